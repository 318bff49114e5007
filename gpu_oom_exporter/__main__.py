"""Run the command line as ``python -m gpu_oom_exporter``."""

from gpu_oom_exporter.cli import main_and_exit

if __name__ == "__main__":
    main_and_exit()
