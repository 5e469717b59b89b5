/* Part of fake_nvml.c: field values, read in one batch. */
enum { AS_UINT = 1, AS_ULL = 3, PER_LINK = 16 };
static const struct { unsigned id; int kind; const char *key; } FIELDS[] = {
    {74, AS_ULL, "FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP"}, {76, AS_ULL, "FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST"},
    {82, AS_UINT, "FI_DEV_MEMORY_TEMP"}, {186, AS_UINT, "FI_DEV_POWER_INSTANT"},
    {230, AS_UINT, "FI_DEV_GET_GPU_RECOVERY_ACTION"},
    {161, AS_ULL | PER_LINK, "FI_DEV_NVLINK_ERROR_DL_REPLAY"},
    {162, AS_ULL | PER_LINK, "FI_DEV_NVLINK_ERROR_DL_RECOVERY"},
    {163, AS_ULL | PER_LINK, "FI_DEV_NVLINK_ERROR_DL_CRC"},
    {220, AS_ULL | PER_LINK, "FI_DEV_NVLINK_COUNT_EFFECTIVE_BER"},
};
static const char *const SLOWDOWNS[] = {"FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
                                        "FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
                                        "FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN"};
static const char *const SMOOTHING[] = {"FI_PWR_SMOOTHING_ENABLED", "FI_PWR_SMOOTHING_PRIV_LVL",
                                        "FI_PWR_SMOOTHING_IMM_RAMP_DOWN_ENABLED"};

/* The three slowdown counters and three of power smoothing changed numbers between drivers ("Known Issues" there). */
static int moved(unsigned id, const char **key) {
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
    const char *key = NULL;
    char full[76];
    u64 links = 0, value = 0;
    int kind = moved(field->id, &key);
    for (unsigned i = 0; !kind && i < sizeof FIELDS / sizeof *FIELDS; i++)
        if (FIELDS[i].id == field->id) {
            kind = FIELDS[i].kind;
            key = FIELDS[i].key;
        }
    if (!kind) return field->id && field->id < 308 ? NOT_SUPPORTED : INVALID_ARGUMENT;
    snprintf(full, sizeof full, "%s", key);
    if (kind & PER_LINK) {
        nvmlReturn_t r = scripted(key, device->slot);
        if (r) return r;
        if (number(device, "links", &links)) return NOT_SUPPORTED;
        if (field->scope >= links) return INVALID_ARGUMENT;
        snprintf(full, sizeof full, "%s.%u", key, field->scope);
    }
    nvmlReturn_t r = number(device, full, &value);
    if (r) return r;
    field->type = (unsigned)(kind & ~PER_LINK);
    if (field->type == AS_UINT) field->value.ui = (unsigned)value;
    else field->value.ull = value;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, FieldValue *fields) {
    struct timespec now;
    ENTER(device);
    NEED(fields && count > 0);
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        memset(&fields[i].value, 0xee, sizeof fields[i].value); /* rubbish where nothing is answered, as in real life */
        fields[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        fields[i].latency_us = 1;
        fields[i].result = answer(device, &fields[i]);
    }
    return SUCCESS;
}

