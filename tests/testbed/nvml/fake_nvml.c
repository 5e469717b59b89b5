/* STAND-IN for NVIDIA's libnvidia-ml.so.1, for tests on machines without a GPU. It is not NVIDIA's library.
 *
 * It answers the functions that the agent calls through nvidia-ml-py, with the signatures, struct layouts, field
 * numbers and error codes of the public NVML API reference, out of a script: a text file named by DROVER_FAKE_NVML,
 * read again whenever it changes, so that a test changes what the "hardware" does while the agent runs. It refuses what
 * a real device refuses: bad handles, null pointers, buffers too small, unknown struct versions, unknown fields and
 * links, calls before nvmlInit. Without DROVER_FAKE_NVML it behaves like a machine without the library.
 *
 * The script, one statement a line, later lines win, GPU is a slot or * for all:
 *   devices N                      how many GPUs nvmlInit finds (a `gone` one is not counted)
 *   driver V / nvml V / cuda N     versions
 *   fields N                       NVML_FI_MAX of the driver: it does not know fields from N on
 *   calls PATH                     count the calls of each function in this file (see struct Calls)
 *   set GPU KEY VALUE              what KEY answers; a KEY without a value is NOT_SUPPORTED. KEYs: the symbols of
 *                                  NVML, "FI_DEV_..." for field values (".LINK" behind it for those of one NVLink),
 *                                  "GPM_METRIC_..."; and serial, uuid, pci, name, vbios, links (NVLinks wired up),
 *                                  gpm (1: the GPU has GPM), fabric_status (the error that joining the fabric ended
 *                                  with), mig_mode (1: in MIG mode), and of its MIG instances,
 *                                  at the places I from 0 to 6: mig.I.uuid (it is there), mig.I.gi (its GPU instance),
 *                                  mig.I.name, mig.I.KEY. A number may move: LOW~HIGH/SECONDS/STEP wanders between
 *                                  two bounds, to another place every SECONDS (1 if left out), in steps from LOW;
 *                                  FIRST+PER_SECOND grows from what it was when the machine started
 *   error GPU WHAT CODE            WHAT, a function or a KEY, fails with CODE, by its name without NVML_ERROR_
 *   block GPU FUNCTION             FUNCTION does not return while this line stands
 *   cost GPU FUNCTION SLEEP_US SPIN_US   what each call costs: time asleep, then time busy; FUNCTION may be *.
 *                                  A batch of field values costs this for each driver call that it takes.
 *   library V                      the driver is of this version: a library from a file of another one's name fails
 *   down CODE                      no call works, nor does nvmlInit: the driver was unloaded, say
 *   lost GPU                       every call on the GPU fails with GPU_IS_LOST
 *   gone GPU                       likewise, and the next nvmlInit does not find it
 *   xid SEQ GPU CODE               one XID event; SEQ grows from line to line and tells new ones from old ones
 */
#define _GNU_SOURCE
#include "script.h"

/* ---- system ---- */

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *script = getenv("DROVER_FAKE_NVML"); /* read here only: threads in other calls must not race setenv */
    pthread_mutex_lock(&lock);
    if (!users) {
        snprintf(path, sizeof path, "%s", script ? script : "");
        find_folder();
        seen_inode = 0;
        reload();
    }
    pthread_mutex_unlock(&lock);
    if (!*path) return LIBRARY_NOT_FOUND;
    nvmlReturn_t r = act("nvmlInitWithFlags", 0);
    if (!r) r = down();
    if (r) return r;
    char value[92];
    int count = find('s', -1, "devices", value) ? atoi(value) : 0;
    if (!__atomic_fetch_add(&users, 1, __ATOMIC_SEQ_CST)) {
        snprintf(driver, sizeof driver, "%s", find('s', -1, "driver", value) ? value : "580.95.05");
        n_listed = 0;
        for (int slot = 0; slot < count && slot < SLOTS; slot++) {
            devices[slot].slot = slot;
            for (int i = 0; i < MIGS; i++) instances[slot * MIGS + i] = (struct nvmlDevice_st){slot, i + 1};
            if (!find('g', slot, "", NULL)) listed[n_listed++] = slot;
        }
    }
    return SUCCESS;
}
/* Not NVML's: a test that left it open must not leave its script to the next one of the process. */
void fakeNvmlForget(void) { __atomic_store_n(&users, 0, __ATOMIC_SEQ_CST); }
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) { /* works without the driver too */
    nvmlReturn_t r = __atomic_load_n(&users, __ATOMIC_SEQ_CST) ? act(__func__, 0) : UNINITIALIZED;
    if (!r) __atomic_fetch_sub(&users, 1, __ATOMIC_SEQ_CST);
    return r;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    for (unsigned i = 0; i < sizeof CODES / sizeof *CODES; i++)
        if (CODES[i].code == code) return CODES[i].text;
    return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    nvmlReturn_t r = enter_system(__func__);
    return r ? r : copy(driver, version, length);
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    nvmlReturn_t r = enter_system(__func__);
    char value[92];
    return r ? r : copy(find('s', -1, "nvml", value) ? value : "13.580.95.05", version, length);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    nvmlReturn_t r = enter_system(__func__);
    char value[92];
    if (r) return r;
    NEED(version);
    *version = find('s', -1, "cuda", value) ? atoi(value) : 13000;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t r = enter_system(__func__);
    if (r) return r;
    NEED(count);
    *count = (unsigned)n_listed;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    if (!__atomic_load_n(&users, __ATOMIC_SEQ_CST)) return UNINITIALIZED;
    NEED(device && index < (unsigned)n_listed);
    nvmlReturn_t r = enter_for(__func__, &devices[listed[index]], 1, 0);
    if (!r) *device = &devices[listed[index]];
    return r;
}

/* ---- one value each ---- */

#define STRING(function, key) \
    nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned length) { \
        ENTER_ANY(device); \
        char value[92]; \
        nvmlReturn_t r = text(device, key, value); \
        return r ? r : copy(value, out, length); \
    }
STRING(nvmlDeviceGetSerial, "serial")
STRING(nvmlDeviceGetUUID, "uuid")
STRING(nvmlDeviceGetName, "name")
STRING(nvmlDeviceGetVbiosVersion, "vbios")
STRING(nvmlDeviceGetInforomImageVersion, "inforom_image")
STRING(nvmlDeviceGetBoardPartNumber, "part_number")

#define UINT(function) \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *out) { \
        ENTER(device); \
        NEED(out); \
        return number32(device, #function, out); \
    }
UINT(nvmlDeviceGetEnforcedPowerLimit)
UINT(nvmlDeviceGetCurrPcieLinkGeneration)
UINT(nvmlDeviceGetCurrPcieLinkWidth)
UINT(nvmlDeviceGetPcieReplayCounter)
UINT(nvmlDeviceGetPowerUsage)
UINT(nvmlDeviceGetPowerManagementLimit)
UINT(nvmlDeviceGetPowerManagementDefaultLimit)
UINT(nvmlDeviceGetPersistenceMode)
UINT(nvmlDeviceGetComputeMode)
UINT(nvmlDeviceGetMaxPcieLinkGeneration)
UINT(nvmlDeviceGetMaxPcieLinkWidth)

#define ULONGLONG(function) \
    nvmlReturn_t function(nvmlDevice_t device, u64 *out) { \
        ENTER(device); \
        NEED(out); \
        return number(device, #function, out); \
    }
ULONGLONG(nvmlDeviceGetCurrentClocksEventReasons)
ULONGLONG(nvmlDeviceGetTotalEnergyConsumption)

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *clock) {
    static const char *const KEYS[] = {"nvmlDeviceGetClockInfo(GRAPHICS)", "nvmlDeviceGetClockInfo(SM)",
                                       "nvmlDeviceGetClockInfo(MEM)", "nvmlDeviceGetClockInfo(VIDEO)"};
    ENTER(device);
    NEED(clock && type < 4);
    return number32(device, KEYS[type], clock);
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *degrees) {
    ENTER(device);
    NEED(degrees && sensor == 0);
    return number32(device, "nvmlDeviceGetTemperatureV(GPU)", degrees);
}
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *out) {
    ENTER(device);
    NEED(out && counter < 2);
    return number32(device, counter ? "nvmlDeviceGetPcieThroughput(RX)" : "nvmlDeviceGetPcieThroughput(TX)", out);
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active) {
    u64 links = 0;
    char key[48];
    ENTER(device);
    NEED(active);
    if (number(device, "links", &links)) return NOT_SUPPORTED;
    NEED(link < links);
    snprintf(key, sizeof key, "nvmlDeviceGetNvLinkState.%u", link);
    return number32(device, key, active);
}
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type, unsigned counter, unsigned location,
                                             u64 *out) {
    static const char *const PLACES[] = {"L1", "L2", "DRAM", "REGISTER", "TEXTURE", "SHM", "CBU", "SRAM"};
    char key[76];
    ENTER(device);
    NEED(out && type < 2 && counter < 2 && location < 8);
    snprintf(key, sizeof key, "nvmlDeviceGetMemoryErrorCounter(%s,%s,%s)", counter ? "AGGREGATE" : "VOLATILE",
             PLACES[location], type ? "UNCORRECTED" : "CORRECTED");
    return number(device, key, out);
}

/* ---- structs ---- */

typedef struct { unsigned gpu, memory; } Utilization;
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, Utilization *out) {
    ENTER(device);
    NEED(out);
    if (mig_mode(device->slot)) return NOT_SUPPORTED; /* "On MIG-enabled GPUs ... not currently supported" */
    nvmlReturn_t r = number32(device, "nvmlDeviceGetUtilizationRates.gpu", &out->gpu);
    return r ? r : number32(device, "nvmlDeviceGetUtilizationRates.memory", &out->memory);
}

typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, Memory2 *out) {
    ENTER_ANY(device);
    NEED(out);
    if (out->version != (sizeof *out | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t r = number(device, "nvmlDeviceGetMemoryInfo_v2.total", &out->total);
    if (!r) r = number(device, "nvmlDeviceGetMemoryInfo_v2.used", &out->used);
    out->reserved = 1 << 20;
    out->free = out->total - out->used - out->reserved;
    return r;
}

typedef struct { unsigned version, sensor; int degrees; } Temperature1;
nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, Temperature1 *out) {
    ENTER(device);
    NEED(out);
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    NEED(out->sensor == 0);
    return number32(device, "nvmlDeviceGetTemperatureV(GPU)", (unsigned *)&out->degrees);
}

typedef struct { unsigned version; int degrees; } Margin1;
nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, Margin1 *out) {
    ENTER(device);
    NEED(out);
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return number32(device, "nvmlDeviceGetMarginTemperature", (unsigned *)&out->degrees);
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } PciInfo;
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, PciInfo *out) {
    char value[92];
    ENTER(device);
    NEED(out);
    nvmlReturn_t r = text(device, "pci", value);
    if (r) return r;
    memset(out, 0, sizeof *out);
    if (sscanf(value, "%x:%x:%x", &out->domain, &out->bus, &out->device) != 3) return UNKNOWN;
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus & 0xff, out->device & 0xff);
    return SUCCESS;
}

typedef struct { unsigned version; u64 counts[11]; unsigned exceeded; } SramStatus1;
/* All ones where the GPU does not have the counter. */
static nvmlReturn_t sram_errors(nvmlDevice_t device, const char *kind, u64 *out) {
    char key[76];
    snprintf(key, sizeof key, "nvmlDeviceGetMemoryErrorCounter(VOLATILE,SRAM,%s)", kind);
    nvmlReturn_t r = number(device, key, out);
    if (r == NOT_SUPPORTED) *out = ~0ull;
    return r == NOT_SUPPORTED ? SUCCESS : r;
}
nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, SramStatus1 *out) {
    u64 uncorrected = 0;
    ENTER(device);
    NEED(out);
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memset(out->counts, 0, sizeof out->counts);
    nvmlReturn_t r = sram_errors(device, "CORRECTED", &out->counts[5]); /* volatileCor */
    if (!r) r = sram_errors(device, "UNCORRECTED", &uncorrected);
    out->counts[3] = uncorrected == ~0ull ? uncorrected : uncorrected / 3; /* volatileUncParity */
    out->counts[4] = uncorrected == ~0ull ? uncorrected : uncorrected - uncorrected / 3; /* volatileUncSecDed */
    return r ? r : number32(device, "nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded", &out->exceeded);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected,
                                       unsigned *pending, unsigned *failed) {
    unsigned *outs[] = {corrected, uncorrected, pending, failed};
    ENTER(device);
    NEED(corrected && uncorrected && pending && failed);
    nvmlReturn_t r = SUCCESS;
    for (int i = 0; i < 4 && !r; i++) {
        char key[48];
        snprintf(key, sizeof key, "nvmlDeviceGetRemappedRows[%d]", i);
        r = number32(device, key, outs[i]);
    }
    return r;
}

typedef struct { unsigned max, high, partial, low, none; } Histogram;
nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, Histogram *out) {
    ENTER(device);
    NEED(out);
    memset(out, 0, sizeof *out);
    nvmlReturn_t r = number32(device, "nvmlDeviceGetRowRemapperHistogram.max", &out->max);
    return r ? r : number32(device, "nvmlDeviceGetRowRemapperHistogram.none", &out->none);
}

static int fabric_status(nvmlDevice_t device) {
    char code[92];
    return find('s', device->slot, "fabric_status", code) ? code_of(code) : SUCCESS;
}
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned health; } Fabric2;
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, Fabric2 *out) {
    _Static_assert(sizeof *out == 0x24, "layout of nvmlGpuFabricInfo_v2_t");
    ENTER(device);
    NEED(out);
    if (out->version != (sizeof *out | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memset(out->cluster, 0xc1, sizeof *out - sizeof out->version); /* padding too: it holds anything in real life */
    if (number32(device, "fabric_clique", &out->clique)) out->clique = 0;
    u64 state = 0;
    nvmlReturn_t r = number(device, "nvmlDeviceGetGpuFabricInfoV", &state);
    out->state = (unsigned char)state;
    out->status = fabric_status(device);
    return r;
}

typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;
static nvmlReturn_t processes(nvmlDevice_t device, const char *key, unsigned first, unsigned *count, Process *out) {
    unsigned have = 0;
    NEED(count);
    nvmlReturn_t r = number32(device, key, &have);
    if (r) return r;
    unsigned room = *count;
    *count = have;
    if (room < have) return INSUFFICIENT_SIZE;
    NEED(out || !have);
    unsigned real = 0; /* a process of this machine, where a test has one that holds the GPU */
    if (first == 0 && have && !number32(device, "first_pid", &real) && real) first = real - 1000u * (unsigned)(device->slot + 1);
    for (unsigned i = 0; i < have; i++)
        out[i] = (Process){first + 1000u * (unsigned)(device->slot + 1) + i, 1ull << 30, 0xffffffffu, 0xffffffffu};
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, Process *out) {
    ENTER_ANY(device);
    return processes(device, "nvmlDeviceGetComputeRunningProcesses", 0, count, out);
}
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, Process *out) {
    ENTER(device);
    return processes(device, "nvmlDeviceGetMPSComputeRunningProcesses", 500, count, out);
}

#include "fields.h"
#include "inventory_mig.h"
#include "samples_events.h"
