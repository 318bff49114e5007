/* A stand-in for libnvidia-ml.so.1, driven by a scenario file that is read again when it changes.
 *
 * Written from the ABI that pynvml speaks (struct layouts and error numbers are in its source). It holds a
 * "device file" open between nvmlInit and nvmlShutdown, so that tests can count who holds the driver.
 *
 * GPU_OOM_NVML_SCENARIO names the scenario; each line is one of:
 *   driver VERSION
 *   device-file PATH
 *   gpu INDEX UUID BUSID MINOR TOTAL RESERVED USED UTIL NAME...
 *   mig GPU SLOT GI CI TOTAL RESERVED USED PROFILE          (turns MIG on for that GPU)
 *   process GPU KIND PID BYTES GI CI SM                     (KIND compute|graphics|mps; BYTES may be NA; GI, CI -1)
 *   error FUNCTION GPU CODE                                 (GPU or FUNCTION may be *; GPU parent: no MIG handle)
 *   delay FUNCTION GPU MILLISECONDS
 *   event SEQUENCE GPU XID                                  (each sequence number is delivered once)
 *   virtualization GPU MODE
 *   recovery GPU ACTION
 *   race GPU TIMES                                          (process lists grow between the two calls)
 *   follow                                                  (a process that has ended frees its memory)
 * Compiled with -DOLD_LIBRARY it lacks what a 2021 driver lacks: memory v2 and the _v3 process lists.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef struct Handle *nvmlDevice_t;
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10 };
enum { GPUS = 16, MIGS = 8, PROCESSES = 8192, RULES = 64, EVENTS = 64 };
#define ANY -1
#define PARENT -2
#define NA 0xFFFFFFFFFFFFFFFFull

struct Memory { unsigned long long total, reserved, used; };
struct Mig { int slot, gi, ci; struct Memory memory; char profile[32]; };
struct Gpu { int present, minor, util, migs, virtualization, recovery, race; char uuid[96], bus[32], name[96];
             struct Memory memory; struct Mig mig[MIGS]; };
struct Process { int gpu, kind, gi, ci, sm; unsigned pid; unsigned long long bytes; };
struct Rule { char function[64]; int gpu, value; };
struct Event { int sequence, gpu, xid; };
struct Handle { int gpu, mig; };

static struct Gpu gpus[GPUS];
static struct Process *processes;
static int process_count;
static struct Rule errors[RULES], delays[RULES];
static int error_count, delay_count;
static struct Event events[EVENTS];
static int event_count, delivered;
static char driver[80], device_file[512];
static struct Handle handles[GPUS][MIGS + 1];
static struct timespec modified;
static off_t size;
static ino_t inode;
static int follow, initialised, device_fd = -1;

static int number_or_any(const char *word) { return word[0] == '*' ? ANY : word[0] == 'p' ? PARENT : atoi(word); }

static void load(void) {
  const char *path = getenv("GPU_OOM_NVML_SCENARIO");
  struct stat now;
  if (!path || stat(path, &now) != 0) return;
  if (now.st_mtim.tv_sec == modified.tv_sec && now.st_mtim.tv_nsec == modified.tv_nsec && now.st_size == size &&
      now.st_ino == inode)
    return;
  FILE *file = fopen(path, "r");
  if (!file) return;
  modified = now.st_mtim; size = now.st_size; inode = now.st_ino;
  if (!processes) processes = calloc(PROCESSES, sizeof *processes);
  memset(gpus, 0, sizeof gpus);
  process_count = error_count = delay_count = event_count = follow = 0;
  snprintf(driver, sizeof driver, "580.95.05");
  char line[1024], a[128], b[128], c[128];
  int g, i, j, k;
  unsigned long long x, y, z;
  while (fgets(line, sizeof line, file)) {
    if (!strncmp(line, "follow", 6)) { follow = 1; continue; }
    if (sscanf(line, "driver %79s", driver) == 1) continue;
    if (sscanf(line, "device-file %511s", device_file) == 1) continue;
    if (sscanf(line, "gpu %d %95s %31s %d %llu %llu %llu %d %95[^\n]", &g, a, b, &i, &x, &y, &z, &j, c) == 9 && g < GPUS) {
      struct Gpu *gpu = &gpus[g];
      gpu->present = 1; gpu->minor = i; gpu->util = j;
      gpu->memory = (struct Memory){x, y, z};
      snprintf(gpu->uuid, sizeof gpu->uuid, "%s", a);
      snprintf(gpu->bus, sizeof gpu->bus, "%s", b);
      snprintf(gpu->name, sizeof gpu->name, "%s", c);
    } else if (sscanf(line, "mig %d %d %d %d %llu %llu %llu %31s", &g, &i, &j, &k, &x, &y, &z, a) == 8 && g < GPUS &&
               gpus[g].migs < MIGS) {
      struct Mig *mig = &gpus[g].mig[gpus[g].migs++];
      mig->slot = i; mig->gi = j; mig->ci = k;
      mig->memory = (struct Memory){x, y, z};
      snprintf(mig->profile, sizeof mig->profile, "%s", a);
    } else if (sscanf(line, "process %d %127s %llu %127s %d %d %d", &g, a, &x, b, &i, &j, &k) == 7 &&
               process_count < PROCESSES) {
      processes[process_count++] = (struct Process){g, a[0], i, j, k, (unsigned)x, b[0] == 'N' ? NA : strtoull(b, 0, 10)};
    } else if (sscanf(line, "error %63s %127s %d", a, b, &i) == 3 && error_count < RULES) {
      snprintf(errors[error_count].function, 64, "%s", a);
      errors[error_count].gpu = number_or_any(b); errors[error_count++].value = i;
    } else if (sscanf(line, "delay %63s %127s %d", a, b, &i) == 3 && delay_count < RULES) {
      snprintf(delays[delay_count].function, 64, "%s", a);
      delays[delay_count].gpu = number_or_any(b); delays[delay_count++].value = i;
    } else if (sscanf(line, "event %d %d %d", &i, &g, &j) == 3 && event_count < EVENTS) {
      events[event_count++] = (struct Event){i, g, j};
    } else if (sscanf(line, "virtualization %d %d", &g, &i) == 2 && g < GPUS) {
      gpus[g].virtualization = i;
    } else if (sscanf(line, "recovery %d %d", &g, &i) == 2 && g < GPUS) {
      gpus[g].recovery = i;
    } else if (sscanf(line, "race %d %d", &g, &i) == 2 && g < GPUS) {
      gpus[g].race = i;
    }
  }
  fclose(file);
}

/* The common beginning of every call: scenario, delay, error. */
static nvmlReturn_t begin(const char *function, int gpu) {
  load();
  for (int i = 0; i < delay_count; i++)
    if ((delays[i].function[0] == '*' || !strcmp(delays[i].function, function)) &&
        (delays[i].gpu == ANY || delays[i].gpu == gpu)) {
      struct timespec wait = {delays[i].value / 1000, delays[i].value % 1000 * 1000000L};
      while (nanosleep(&wait, &wait) != 0 && errno == EINTR) {}
    }
  for (int i = 0; i < error_count; i++)
    if ((errors[i].function[0] == '*' || !strcmp(errors[i].function, function)) &&
        (errors[i].gpu == ANY || errors[i].gpu == gpu))
      return errors[i].value;
  return OK;
}

#define BEGIN(gpu_index)                                      \
  do {                                                        \
    nvmlReturn_t code = begin(__func__, gpu_index);           \
    if (code) return code;                                    \
    if (!initialised) return UNINITIALIZED;                   \
  } while (0)

#define BEGIN_DEVICE(device)                                                                      \
  if (!(device)) return INVALID;                                                                  \
  BEGIN((device)->gpu);                                                                           \
  struct Gpu *gpu = &gpus[(device)->gpu];                                                         \
  struct Mig *mig = (device)->mig >= 0 && (device)->mig < gpu->migs ? &gpu->mig[(device)->mig] : 0; \
  (void)mig

static nvmlReturn_t start(const char *function) {
  nvmlReturn_t code = begin(function, ANY);
  if (code) return code;
  if (device_fd < 0 && device_file[0]) device_fd = open(device_file, O_RDONLY | O_CLOEXEC);
  initialised = 1;
  return OK;
}

nvmlReturn_t nvmlInit_v2(void) { return start(__func__); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return start(__func__); }

nvmlReturn_t nvmlShutdown(void) {
  BEGIN(ANY);
  if (device_fd >= 0) close(device_fd);
  device_fd = -1;
  initialised = 0;
  return OK;
}

const char *nvmlErrorString(nvmlReturn_t code) { (void)code; return "stand-in error"; }

nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length) {
  BEGIN(ANY);
  snprintf(text, length, "%s", driver);
  return OK;
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *text, unsigned length) {
  BEGIN(ANY);
  snprintf(text, length, "13.%s", driver);
  return OK;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
  BEGIN(ANY);
  *count = 0;
  for (int i = 0; i < GPUS; i++) *count += gpus[i].present;
  return OK;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
  BEGIN((int)index);
  if (index >= GPUS || !gpus[index].present) return INVALID;
  handles[index][MIGS] = (struct Handle){(int)index, -1};
  *device = &handles[index][MIGS];
  return OK;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
  BEGIN(ANY);
  for (unsigned i = 0; i < GPUS; i++)
    if (gpus[i].present && !strcmp(gpus[i].uuid, uuid)) {
      handles[i][MIGS] = (struct Handle){(int)i, -1};
      *device = &handles[i][MIGS];
      return OK;
    }
  return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device) {
  BEGIN(ANY);
  for (unsigned i = 0; i < GPUS; i++) /* NVML takes short and long domains; the scenario's are long and upper case */
    if (gpus[i].present && !strcasecmp(gpus[i].bus + strlen(gpus[i].bus) - strlen(address), address)) {
      handles[i][MIGS] = (struct Handle){(int)i, -1};
      *device = &handles[i][MIGS];
      return OK;
    }
  return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
  BEGIN_DEVICE(device);
  *index = (unsigned)device->gpu;
  return OK;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length) {
  BEGIN_DEVICE(device);
  if (mig) snprintf(text, length, "%s MIG %s", gpu->name, mig->profile);
  else snprintf(text, length, "%s", gpu->name);
  return OK;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) {
  BEGIN_DEVICE(device);
  if (mig) snprintf(text, length, "MIG-%d-%d-%d", device->gpu, mig->gi, mig->ci);
  else snprintf(text, length, "%s", gpu->uuid);
  return OK;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) {
  BEGIN_DEVICE(device);
  *minor = (unsigned)gpu->minor;
  return OK;
}

struct Pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char busid[32]; };

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct Pci *pci) {
  BEGIN_DEVICE(device);
  memset(pci, 0, sizeof *pci);
  snprintf(pci->busid, sizeof pci->busid, "%s", gpu->bus);
  return OK;
}

/* Whether a process has ended, or is a zombie without threads: then the driver has its memory back. */
static int ended(unsigned pid) {
  char path[64], text[512];
  snprintf(path, sizeof path, "/proc/%u/stat", pid);
  FILE *file = fopen(path, "r");
  if (!file) return 1;
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  char *end = strrchr(text, ')');
  return !end || end[2] == 'Z' || end[2] == 'X';
}

static unsigned long long given_back(int gpu) {
  unsigned long long bytes = 0;
  for (int i = 0; follow && i < process_count; i++)
    if (processes[i].gpu == gpu && processes[i].bytes != NA && ended(processes[i].pid)) bytes += processes[i].bytes;
  return bytes;
}

struct MemoryV1 { unsigned long long total, free, used; };

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct MemoryV1 *out) {
  BEGIN_DEVICE(device);
  struct Memory *m = mig ? &mig->memory : &gpu->memory;
  out->total = m->total;
  out->used = m->used + m->reserved - given_back(device->gpu); /* v1 counts what is reserved as used */
  out->free = m->total - out->used;
  return OK;
}

#ifndef OLD_LIBRARY
struct MemoryV2 { unsigned version; unsigned long long total, reserved, free, used; };

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct MemoryV2 *out) {
  BEGIN_DEVICE(device);
  struct Memory *m = mig ? &mig->memory : &gpu->memory;
  out->total = m->total;
  out->reserved = m->reserved;
  out->used = m->used - given_back(device->gpu);
  out->free = m->total - m->reserved - out->used;
  return OK;
}
#endif

struct ProcessInfo { unsigned pid; unsigned long long bytes; unsigned gi, ci; };

static nvmlReturn_t list(nvmlDevice_t device, int kind, unsigned *count, struct ProcessInfo *out) {
  struct Gpu *gpu = &gpus[device->gpu];
  struct Mig *mig = device->mig >= 0 && device->mig < gpu->migs ? &gpu->mig[device->mig] : 0;
  unsigned room = *count, found = 0;
  if (out && gpu->race > 0) { gpu->race--; room = 0; }
  for (int i = 0; i < process_count; i++) {
    struct Process *p = &processes[i];
    if (p->gpu != device->gpu || p->kind != kind || (mig && p->gi != mig->gi)) continue;
    if (follow && ended(p->pid)) continue;
    if (out && found < room)
      out[found] = (struct ProcessInfo){p->pid, p->bytes, (unsigned)p->gi, (unsigned)p->ci};
    found++;
  }
  *count = found;
  if (found == 0) return OK;
  return !out || found > room ? TOO_SMALL : OK;
}

static nvmlReturn_t parent_error(const char *function, nvmlDevice_t device) {
  for (int i = 0; i < error_count; i++)
    if (errors[i].gpu == PARENT && device->mig < 0 && !strcmp(errors[i].function, function)) return errors[i].value;
  return OK;
}

#define LIST(function, kind)                                                                      \
  nvmlReturn_t function(nvmlDevice_t device, unsigned *count, struct ProcessInfo *out) {          \
    BEGIN_DEVICE(device);                                                                         \
    if (parent_error(__func__, device)) return parent_error(__func__, device);                    \
    return list(device, kind, count, out);                                                        \
  }
LIST(nvmlDeviceGetComputeRunningProcesses_v2, 'c')
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, 'g')
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, 'm')
#ifndef OLD_LIBRARY
LIST(nvmlDeviceGetComputeRunningProcesses_v3, 'c')
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, 'g')
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, 'm')
#endif

struct Sample { unsigned pid; unsigned long long time; unsigned sm, mem, enc, dec; };

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, struct Sample *out, unsigned *count,
                                             unsigned long long since) {
  BEGIN_DEVICE(device);
  unsigned room = *count, found = 0;
  (void)since;
  for (int i = 0; i < process_count; i++) {
    struct Process *p = &processes[i];
    if (p->gpu != device->gpu || p->sm <= 0) continue;
    if (out && found < room) out[found] = (struct Sample){p->pid, since + 1, (unsigned)p->sm, 0, 0, 0};
    found++;
  }
  *count = found;
  if (!found) return NOT_FOUND;
  return !out || found > room ? TOO_SMALL : OK;
}

struct Rates { unsigned gpu, memory; };

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct Rates *rates) {
  BEGIN_DEVICE(device);
  rates->gpu = (unsigned)gpu->util;
  rates->memory = 0;
  return OK;
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, unsigned *mode) {
  BEGIN_DEVICE(device);
  *mode = (unsigned)gpu->virtualization;
  return OK;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
  BEGIN_DEVICE(device);
  *current = *pending = gpu->migs > 0;
  return OK;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
  BEGIN_DEVICE(device);
  *count = gpu->migs ? MIGS : 0;
  return OK;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned slot, nvmlDevice_t *out) {
  BEGIN_DEVICE(device);
  for (int i = 0; i < gpu->migs; i++)
    if (gpu->mig[i].slot == (int)slot) {
      handles[device->gpu][i] = (struct Handle){device->gpu, i};
      *out = &handles[device->gpu][i];
      return OK;
    }
  return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
  BEGIN_DEVICE(device);
  if (!mig) return NOT_SUPPORTED;
  *id = (unsigned)mig->gi;
  return OK;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
  BEGIN_DEVICE(device);
  if (!mig) return NOT_SUPPORTED;
  *id = (unsigned)mig->ci;
  return OK;
}

struct Field { unsigned field, scope; long long time, latency; unsigned type; nvmlReturn_t code;
               union { double d; unsigned u; unsigned long long ull; } value; };

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, struct Field *values) {
  BEGIN_DEVICE(device);
  for (int i = 0; i < count; i++) {
    values[i].code = values[i].field == 230 ? OK : NOT_SUPPORTED;
    values[i].value.ull = 0;
    values[i].value.u = (unsigned)gpu->recovery;
  }
  return OK;
}

struct EventData { nvmlDevice_t device; unsigned long long type, data; unsigned gi, ci; };
static int event_set;

nvmlReturn_t nvmlEventSetCreate(void **set) { BEGIN(ANY); *set = &event_set; return OK; }
nvmlReturn_t nvmlEventSetFree(void *set) { (void)set; BEGIN(ANY); return OK; }

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, void *set) {
  BEGIN_DEVICE(device);
  (void)types; (void)set; (void)gpu;
  return OK;
}

nvmlReturn_t nvmlEventSetWait_v2(void *set, struct EventData *out, unsigned timeout) {
  (void)set; (void)timeout;
  BEGIN(ANY);
  for (int i = 0; i < event_count; i++)
    if (events[i].sequence > delivered) {
      delivered = events[i].sequence;
      handles[events[i].gpu][MIGS] = (struct Handle){events[i].gpu, -1};
      *out = (struct EventData){&handles[events[i].gpu][MIGS], 8, (unsigned long long)events[i].xid, ~0u, ~0u};
      return OK;
    }
  return TIMEOUT;
}

/* Asked by nvitop-exporter in the benchmark. */
#define UNSIGNED(function, answer) \
  nvmlReturn_t function(nvmlDevice_t device, unsigned *out) { BEGIN_DEVICE(device); *out = (answer); return OK; }
UNSIGNED(nvmlDeviceGetFanSpeed, 30)
UNSIGNED(nvmlDeviceGetPowerUsage, 300000)
UNSIGNED(nvmlDeviceGetPowerManagementLimit, 700000)
UNSIGNED(nvmlDeviceGetEnforcedPowerLimit, 700000)
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *out) {
  BEGIN_DEVICE(device); (void)sensor; *out = 45; return OK;
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int kind, unsigned *out) {
  BEGIN_DEVICE(device); (void)kind; *out = 1500; return OK;
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int kind, unsigned *out) {
  BEGIN_DEVICE(device); (void)kind; *out = 1980; return OK;
}
