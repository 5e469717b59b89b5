/* Part of fake_nvml.c: field values, read in one batch. */
enum { AS_UINT = 1, AS_ULL = 3, PER_LINK = 16 };
/* `key` is where the value stands in the script: fields that tell the same as a function share its key. `served` is the
 * driver call behind a field: NVML makes one for all fields of a batch that come from the same (API reference). */
static const struct { unsigned id; int kind; const char *name, *key; unsigned served; } FIELDS[] = {
    {11, AS_ULL, "FI_DEV_ECC_SBE_VOL_DEV", "nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,CORRECTED)", 1},
    {12, AS_ULL, "FI_DEV_ECC_DBE_VOL_DEV", "nvmlDeviceGetMemoryErrorCounter(VOLATILE,DRAM,UNCORRECTED)", 1},
    {74, AS_ULL, "FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP", NULL, 2},
    {76, AS_ULL, "FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST", NULL, 2},
    {82, AS_UINT, "FI_DEV_MEMORY_TEMP", NULL, 3},
    {83, AS_ULL, "FI_DEV_TOTAL_ENERGY_CONSUMPTION", "nvmlDeviceGetTotalEnergyConsumption", 4},
    {94, AS_UINT, "FI_DEV_PCIE_REPLAY_COUNTER", "nvmlDeviceGetPcieReplayCounter", 5},
    {142, AS_UINT, "FI_DEV_REMAPPED_COR", "nvmlDeviceGetRemappedRows[0]", 6},
    {143, AS_UINT, "FI_DEV_REMAPPED_UNC", "nvmlDeviceGetRemappedRows[1]", 6},
    {144, AS_UINT, "FI_DEV_REMAPPED_PENDING", "nvmlDeviceGetRemappedRows[2]", 6},
    {145, AS_UINT, "FI_DEV_REMAPPED_FAILURE", "nvmlDeviceGetRemappedRows[3]", 6},
    {186, AS_UINT, "FI_DEV_POWER_INSTANT", NULL, 7},
    {187, AS_UINT, "FI_DEV_POWER_MIN_LIMIT", NULL, 7},
    {188, AS_UINT, "FI_DEV_POWER_MAX_LIMIT", NULL, 7},
    {189, AS_UINT, "FI_DEV_POWER_DEFAULT_LIMIT", NULL, 7},
    {190, AS_UINT, "FI_DEV_POWER_CURRENT_LIMIT", "nvmlDeviceGetEnforcedPowerLimit", 7},
    {230, AS_UINT, "FI_DEV_GET_GPU_RECOVERY_ACTION", NULL, 8},
    {161, AS_ULL | PER_LINK, "FI_DEV_NVLINK_ERROR_DL_REPLAY", NULL, 100},
    {162, AS_ULL | PER_LINK, "FI_DEV_NVLINK_ERROR_DL_RECOVERY", NULL, 100},
    {163, AS_ULL | PER_LINK, "FI_DEV_NVLINK_ERROR_DL_CRC", NULL, 100},
    {165, AS_UINT | PER_LINK, "FI_DEV_NVLINK_GET_STATE", "nvmlDeviceGetNvLinkState", 200},
    {220, AS_ULL | PER_LINK, "FI_DEV_NVLINK_COUNT_EFFECTIVE_BER", NULL, 300},
};
#define N_FIELDS (sizeof FIELDS / sizeof *FIELDS)
static const char *const SLOWDOWNS[] = {"FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
                                        "FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
                                        "FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN"};
static const char *const SMOOTHING[] = {"FI_PWR_SMOOTHING_ENABLED", "FI_PWR_SMOOTHING_PRIV_LVL",
                                        "FI_PWR_SMOOTHING_IMM_RAMP_DOWN_ENABLED"};

/* The three slowdown counters and three of power smoothing changed numbers between drivers ("Known Issues" there). */
static int moved(unsigned id, const char **key) {
    if (id < 251 || id >= 272) return 0;
    int major = 0, minor = 0, patch = 0;
    sscanf(driver, "%d.%d.%d", &major, &minor, &patch);
    int is_new = major > 580 || (major == 580 && minor >= 82), r575 = !is_new && major >= 575;
    unsigned slowdown = is_new ? 269 : r575 ? 251 : 0, smoothing = is_new ? 251 : r575 ? 256 : major >= 570 ? 251 : 0;
    if (slowdown && id - slowdown < 3) { *key = SLOWDOWNS[id - slowdown]; return AS_ULL; }
    if (smoothing && id - smoothing < 3) { *key = SMOOTHING[id - smoothing]; return AS_UINT; }
    return 0;
}

typedef struct {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type;
    int result;
    union { double d; unsigned ui; unsigned long ul; u64 ull; long long sll; } value;
} FieldValue;

static nvmlReturn_t answer(nvmlDevice_t device, FieldValue *field) {
    const char *key = NULL, *name = NULL;
    char full[76], fields[92];
    u64 links = 0, value = 0;
    /* What the driver's own NVML_FI_MAX is: it does not know any later field. */
    if (find('s', -1, "fields", fields) && field->id >= (unsigned)atoi(fields)) return INVALID_ARGUMENT;
    int kind = moved(field->id, &key);
    for (unsigned i = 0; !kind && i < N_FIELDS; i++)
        if (FIELDS[i].id == field->id) {
            kind = FIELDS[i].kind;
            name = FIELDS[i].name;
            key = FIELDS[i].key ? FIELDS[i].key : name;
        }
    if (!kind) return field->id && field->id < 308 ? NOT_SUPPORTED : INVALID_ARGUMENT;
    if (name && name != key) {
        nvmlReturn_t r = scripted(name, device->slot);
        if (r) return r;
    }
    if (kind & PER_LINK) {
        nvmlReturn_t r = scripted(key, device->slot);
        if (r) return r;
        if (number(device, "links", &links)) return NOT_SUPPORTED;
        if (field->scope >= links) return INVALID_ARGUMENT;
        snprintf(full, sizeof full, "%s.%u", key, field->scope);
        key = full;
    }
    nvmlReturn_t r = number(device, key, &value);
    if (r) return r;
    field->type = (unsigned)(kind & ~PER_LINK);
    if (field->type == AS_UINT) field->value.ui = (unsigned)value;
    else field->value.ull = value;
    return SUCCESS;
}

/* How many driver calls a batch takes: one for each `served`, and of each NVLink (the real number is not published). */
static unsigned driver_calls(const FieldValue *fields, int count) {
    unsigned seen[N_FIELDS + 256], n = 0;
    for (int i = 0; i < count; i++) {
        unsigned served = fields[i].id >= 251 && fields[i].id < 272 ? 2 : 1000 + fields[i].id, k = 0;
        for (unsigned f = 0; f < N_FIELDS; f++)
            if (FIELDS[f].id == fields[i].id)
                served = FIELDS[f].served + (FIELDS[f].kind & PER_LINK ? fields[i].scope : 0);
        while (k < n && seen[k] != served) k++;
        if (k == n && n < sizeof seen / sizeof *seen) seen[n++] = served;
    }
    return n;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, FieldValue *fields) {
    struct timespec now;
    NEED(fields && count > 0);
    nvmlReturn_t entered = enter_for(__func__, device, driver_calls(fields, count), 0);
    if (entered) return entered;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        memset(&fields[i].value, 0xee, sizeof fields[i].value); /* rubbish where nothing is answered, as in real life */
        fields[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        fields[i].latency_us = 1;
        fields[i].result = answer(device, &fields[i]);
    }
    return SUCCESS;
}

