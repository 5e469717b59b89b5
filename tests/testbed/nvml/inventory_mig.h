/* Part of fake_nvml.c: what a GPU is and how it is set up, older forms of calls, MIG instances. */

nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, unsigned object, char *out, unsigned length) {
    static const char *const KEYS[] = {"inforom_oem", "inforom_ecc", "inforom_power"};
    char value[92];
    ENTER(device);
    NEED(object < 3);
    nvmlReturn_t r = text(device, KEYS[object], value);
    return r ? r : copy(value, out, length);
}
nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *out) {
    char value[92];
    ENTER(device);
    nvmlReturn_t r = text(device, "gsp_firmware", value);
    return r ? r : copy(value, out, 64);
}
static nvmlReturn_t pair(nvmlDevice_t device, const char *one, const char *two, unsigned *first, unsigned *second) {
    NEED(first && second);
    nvmlReturn_t r = number32(device, one, first);
    return r ? r : number32(device, two, second);
}
nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *low, unsigned *high) {
    ENTER(device);
    return pair(device, "FI_DEV_POWER_MIN_LIMIT", "FI_DEV_POWER_MAX_LIMIT", low, high);
}
nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *now, unsigned *pending) {
    ENTER(device);
    return pair(device, "ecc_mode", "ecc_mode_pending", now, pending);
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending) {
    ENTER(device);
    return pair(device, "mig_mode", "mig_mode", now, pending);
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *clock) {
    ENTER(device);
    NEED(clock && type < 4);
    return number32(device, type == 2 ? "memory_clock_max" : "sm_clock_max", clock);
}
nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned type, unsigned *temp) {
    ENTER(device);
    NEED(temp);
    return type == 2 ? number32(device, "memory_temp_max", temp) : NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, unsigned *type) {
    u64 links = 0;
    ENTER(device);
    NEED(type);
    if (number(device, "links", &links)) return NOT_SUPPORTED;
    NEED(link < links);
    *type = 2; /* a switch */
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, PciInfo *out) {
    u64 links = 0;
    ENTER(device);
    NEED(out);
    if (number(device, "links", &links)) return NOT_SUPPORTED;
    NEED(link < links);
    memset(out, 0, sizeof *out);
    out->bus = 0xd0 + link % 4; /* four switches */
    return SUCCESS;
}

/* ---- older forms: they answer what the newer ones do, also where those are not found ---- */

static nvmlReturn_t of_newer(nvmlDevice_t device, const char *key, u64 *out) {
    char value[92];
    nvmlReturn_t r = scripted(key, device->slot);
    if (r && r != FUNCTION_NOT_FOUND) return r;
    if (!find('s', device->slot, key, value)) return NOT_SUPPORTED;
    *out = strtoull(value, NULL, 0);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, u64 *out) {
    ENTER(device);
    NEED(out);
    return of_newer(device, "nvmlDeviceGetCurrentClocksEventReasons", out);
}
typedef struct { u64 total, free, used; } Memory1;
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, Memory1 *out) {
    ENTER_ANY(device);
    NEED(out);
    nvmlReturn_t r = number(device, "nvmlDeviceGetMemoryInfo_v2.total", &out->total);
    if (!r) r = number(device, "nvmlDeviceGetMemoryInfo_v2.used", &out->used);
    out->free = out->total - out->used;
    return r;
}
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } Fabric1;
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, Fabric1 *out) {
    u64 state = 0;
    ENTER(device);
    NEED(out);
    nvmlReturn_t r = of_newer(device, "nvmlDeviceGetGpuFabricInfoV", &state);
    memset(out, 0xc1, sizeof *out);
    out->state = (unsigned char)state;
    out->status = fabric_status(device);
    return r;
}

/* ---- MIG ---- */

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    unsigned mode = 0;
    ENTER(device);
    NEED(count);
    *count = number32(device, "mig_mode", &mode) ? 0 : MIGS;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *out) {
    ENTER(device);
    NEED(out && index < MIGS);
    nvmlDevice_t instance = &instances[device->slot * MIGS + (int)index];
    if (!is_handle(instance, 1)) return NOT_FOUND;
    *out = instance;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    ENTER_ANY(device);
    NEED(id);
    return device->mig ? number32(device, "gi", id) : NOT_SUPPORTED;
}
