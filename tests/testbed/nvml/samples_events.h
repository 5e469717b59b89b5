/* Part of fake_nvml.c: GPM samples and events, the calls that keep state between each other. */
/* ---- GPM ---- */

typedef struct nvmlGpmSample_st { unsigned magic; int slot, mig; u64 number; } *nvmlGpmSample_t;
typedef struct { unsigned id; int result; double value; const char *names[3]; } GpmMetric;
typedef struct { unsigned version, count; nvmlGpmSample_t first, second; GpmMetric metrics[]; } GpmGet;
typedef struct { unsigned version, supported; } GpmSupport;
#define GPM_MAGIC 0x67706d21u
static const struct { unsigned id; const char *key; } GPM[] = {
    {1, "GPM_METRIC_GRAPHICS_UTIL"}, {2, "GPM_METRIC_SM_UTIL"}, {3, "GPM_METRIC_SM_OCCUPANCY"}, {5, "GPM_METRIC_ANY_TENSOR_UTIL"},
    {10, "GPM_METRIC_DRAM_BW_UTIL"}, {11, "GPM_METRIC_FP64_UTIL"}, {12, "GPM_METRIC_FP32_UTIL"},
    {13, "GPM_METRIC_FP16_UTIL"}, {20, "GPM_METRIC_PCIE_TX_PER_SEC"}, {21, "GPM_METRIC_PCIE_RX_PER_SEC"},
    {60, "GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC"}, {61, "GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC"},
};

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, GpmSupport *out) {
    ENTER(device);
    NEED(out);
    if (out->version != 1) return ARGUMENT_VERSION_MISMATCH;
    return number32(device, "gpm", &out->supported) ? (out->supported = 0, SUCCESS) : SUCCESS;
}
nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *out) {
    nvmlReturn_t r = enter_system(__func__);
    if (r) return r;
    NEED(out);
    *out = calloc(1, sizeof **out);
    (*out)->magic = GPM_MAGIC;
    return SUCCESS;
}
nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
    nvmlReturn_t r = enter_system(__func__);
    if (r) return r;
    NEED(sample && sample->magic == GPM_MAGIC);
    sample->magic = 0;
    free(sample);
    return SUCCESS;
}
static u64 taken;
nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample) {
    unsigned supported = 0;
    ENTER(device);
    NEED(sample && sample->magic == GPM_MAGIC);
    if (number32(device, "gpm", &supported) || !supported) return NOT_SUPPORTED;
    sample->slot = device->slot;
    sample->mig = 0;
    sample->number = __atomic_add_fetch(&taken, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned instance, nvmlGpmSample_t sample) {
    unsigned supported = 0, id = 0;
    ENTER(device);
    NEED(sample && sample->magic == GPM_MAGIC);
    if (number32(device, "gpm", &supported) || !supported) return NOT_SUPPORTED;
    for (int i = 0; i < MIGS; i++) {
        nvmlDevice_t mig = &instances[device->slot * MIGS + i];
        if (is_handle(mig, 1) && !number32(mig, "gi", &id) && id == instance) {
            sample->slot = device->slot;
            sample->mig = i + 1;
            sample->number = __atomic_add_fetch(&taken, 1, __ATOMIC_SEQ_CST);
            return SUCCESS;
        }
    }
    return INVALID_ARGUMENT;
}
nvmlReturn_t nvmlGpmMetricsGet(GpmGet *get) {
    nvmlReturn_t r = enter_system(__func__);
    if (r) return r;
    NEED(get);
    if (get->version != 1) return ARGUMENT_VERSION_MISMATCH;
    NEED(get->first && get->second && get->first->magic == GPM_MAGIC && get->second->magic == GPM_MAGIC);
    /* Two samples of the same GPU, the older one first, or there is no difference to build. */
    NEED(get->first->slot == get->second->slot && get->first->mig == get->second->mig);
    NEED(get->first->number && get->first->number < get->second->number);
    nvmlDevice_t whose = &devices[get->first->slot];
    if (get->first->mig) whose = &instances[get->first->slot * MIGS + get->first->mig - 1];
    for (unsigned i = 0; i < get->count; i++) {
        char value[92];
        GpmMetric *metric = &get->metrics[i];
        metric->value = 0;
        metric->result = INVALID_ARGUMENT;
        for (unsigned g = 0; g < sizeof GPM / sizeof *GPM; g++)
            if (GPM[g].id == metric->id) {
                metric->result = text(whose, GPM[g].key, value);
                if (!metric->result) metric->value = moving(whose->slot, GPM[g].key, value);
            }
    }
    return SUCCESS;
}

/* ---- events ---- */

typedef struct nvmlEventSet_st { unsigned magic; unsigned long last; u64 slots; } *nvmlEventSet_t;
typedef struct { nvmlDevice_t device; u64 type, data; unsigned gpu_instance, compute_instance; } EventData;
#define SET_MAGIC 0x65767421u
#define XID_CRITICAL 8ull

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out) {
    nvmlReturn_t r = enter_system(__func__);
    if (r) return r;
    NEED(out);
    *out = calloc(1, sizeof **out);
    (*out)->magic = SET_MAGIC;
    pthread_mutex_lock(&lock); /* what happened before the set was made is not told */
    for (int i = 0; i < n_xids; i++)
        if (xids[i].seq > (*out)->last) (*out)->last = xids[i].seq;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    nvmlReturn_t r = enter_system(__func__);
    if (r) return r;
    NEED(set && set->magic == SET_MAGIC);
    set->magic = 0;
    free(set);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, u64 types, nvmlEventSet_t set) {
    ENTER(device);
    NEED(set && set->magic == SET_MAGIC);
    if (!types || types & ~XID_CRITICAL) return NOT_SUPPORTED;
    set->slots |= 1ull << device->slot;
    return SUCCESS;
}
/* Until the script may have changed, or the time is over: as the real one it sleeps, for its CPU counts as the agent's.
 * Its folder is watched from one wait to the next. */
static void await_script(u64 end_us) {
    static int watch = -1;
    static char watched[sizeof path];
    char dir[sizeof path], events[4096];
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (slash) *slash = 0;
    pthread_mutex_lock(&lock);
    if (watch < 0 || strcmp(watched, dir)) {
        if (watch >= 0) close(watch);
        watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
        inotify_add_watch(watch, slash ? dir : ".", IN_MOVED_TO | IN_CLOSE_WRITE);
        snprintf(watched, sizeof watched, "%s", dir);
    }
    while (read(watch, events, sizeof events) > 0) {} /* what they tell is seen by the next line */
    struct pollfd look = {.fd = watch, .events = POLLIN};
    ino_t before = seen_inode;
    reload();
    int changed = before != seen_inode;
    pthread_mutex_unlock(&lock);
    u64 now = now_us();
    if (!changed && now < end_us) poll(&look, 1, (int)((end_us - now + 999) / 1000));
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, EventData *out, unsigned timeout_ms) {
    nvmlReturn_t entered = enter_system(__func__);
    if (entered) return entered;
    NEED(out && set && set->magic == SET_MAGIC);
    for (u64 end = now_us() + 1000ull * timeout_ms;;) {
        nvmlReturn_t r = scripted(__func__, 0);
        if (!r) r = down();
        if (r) return r;
        int found = -1;
        pthread_mutex_lock(&lock);
        for (int i = 0; i < n_xids && found < 0; i++)
            if (xids[i].seq > set->last && set->slots >> xids[i].gpu & 1) found = i;
        if (found >= 0) {
            set->last = xids[found].seq;
            *out = (EventData){&devices[xids[found].gpu], XID_CRITICAL, xids[found].code, 0xffffffffu, 0xffffffffu};
        }
        pthread_mutex_unlock(&lock);
        if (found >= 0) return SUCCESS;
        for (int slot = 0; slot < SLOTS; slot++)
            if (set->slots >> slot & 1 && is_lost(slot)) return GPU_IS_LOST;
        if (now_us() >= end) return TIMEOUT;
        await_script(end);
        pthread_mutex_lock(&lock);
        reload();
        pthread_mutex_unlock(&lock);
    }
}
