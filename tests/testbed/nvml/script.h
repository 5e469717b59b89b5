/* Part of fake_nvml.c: the script, and what every call goes through before it answers. */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef unsigned long long u64;
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10, LIBRARY_NOT_FOUND = 12, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};
static const struct { int code; const char *name, *text; } CODES[] = {
    {0, "SUCCESS", "Success"}, {1, "UNINITIALIZED", "Uninitialized"}, {2, "INVALID_ARGUMENT", "Invalid Argument"},
    {3, "NOT_SUPPORTED", "Not Supported"}, {4, "NO_PERMISSION", "Insufficient Permissions"},
    {6, "NOT_FOUND", "Not Found"}, {7, "INSUFFICIENT_SIZE", "Insufficient Size"},
    {9, "DRIVER_NOT_LOADED", "Driver Not Loaded"}, {10, "TIMEOUT", "Timeout"},
    {12, "LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"}, {13, "FUNCTION_NOT_FOUND", "Function Not Found"},
    {14, "CORRUPTED_INFOROM", "Corrupted infoROM"}, {15, "GPU_IS_LOST", "GPU is lost"},
    {16, "RESET_REQUIRED", "GPU requires reset"}, {17, "OPERATING_SYSTEM", "Blocked by the operating system"},
    {18, "LIB_RM_VERSION_MISMATCH", "Driver/library version mismatch"}, {19, "IN_USE", "In use by another client"},
    {20, "MEMORY", "Insufficient Memory"}, {21, "NO_DATA", "No data"},
    {25, "ARGUMENT_VERSION_MISMATCH", "Argument version mismatch"}, {26, "DEPRECATED", "Deprecated"},
    {27, "NOT_READY", "Not Ready"}, {28, "GPU_NOT_FOUND", "GPU not found"}, {999, "UNKNOWN", "Unknown Error"},
};

/* ---- the script ---- */

#define SLOTS 64
#define XIDS 4096
typedef struct { char verb; short gpu; char key[76]; char value[92]; } Entry;
static struct { unsigned long seq; int gpu; u64 code; } xids[XIDS];
static Entry *table; /* no larger than the script needs: it counts as agent memory, and each look costs a cache miss */
static unsigned table_size; /* a power of two, at least twice the entries */
static unsigned of_verb[128]; /* how many entries a verb has: most scripts have none of most, and no look is needed */
static int n_xids;
static char path[4096];
static struct timespec seen_time;
static off_t seen_size;
static ino_t seen_inode;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Entry *place(char verb, int gpu, const char *key) {
    unsigned hash = 2166136261u ^ (unsigned char)verb;
    hash = hash * 16777619u ^ (unsigned)gpu;
    for (const char *c = key; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    for (unsigned i = hash;; i++) {
        Entry *e = &table[i % table_size];
        if (!e->verb || (e->verb == verb && e->gpu == gpu && !strcmp(e->key, key))) return e;
    }
}

static void store(char verb, int gpu, const char *key, const char *value) {
    Entry *e = place(verb, gpu, key);
    e->verb = verb;
    of_verb[(unsigned char)verb]++;
    e->gpu = (short)gpu;
    snprintf(e->key, sizeof e->key, "%s", key);
    snprintf(e->value, sizeof e->value, "%s", value);
}

static void refuse_script(const char *line) {
    fprintf(stderr, "fake_nvml: this line of %s is no statement: %s\n", path, line);
    abort();
}

static void parse(char *line) {
    char verb[16], gpu[92], key[76], value[92] = "";
    line[strcspn(line, "\r\n")] = 0;
    if (!*line || *line == '#') return;
    int n = sscanf(line, "%15s %91s %75s %91[^\n]", verb, gpu, key, value);
    if (n == 2 && (!strcmp(verb, "devices") || !strcmp(verb, "driver") || !strcmp(verb, "nvml") ||
                   !strcmp(verb, "cuda") || !strcmp(verb, "calls") || !strcmp(verb, "fields") ||
                   !strcmp(verb, "down") || !strcmp(verb, "library"))) {
        store('s', -1, verb, gpu);
        return;
    }
    if (n == 4 && !strcmp(verb, "xid")) {
        if (n_xids == XIDS) refuse_script("too many xid lines");
        xids[n_xids].seq = strtoul(gpu, NULL, 10);
        xids[n_xids].gpu = atoi(key);
        xids[n_xids++].code = strtoull(value, NULL, 10);
        return;
    }
    if (n == 2 && (!strcmp(verb, "lost") || !strcmp(verb, "gone"))) {
        key[0] = 0;
        n = 4;
    }
    static const char *const VERBS[] = {"set", "error", "block", "cost", "lost", "gone"};
    int wanted = !strcmp(verb, "block") ? 3 : 4;
    for (unsigned v = 0; v < 6; v++)
        if (!strcmp(verb, VERBS[v]) && n >= wanted) { /* '*' stands behind each slot of its own: lookups stay single */
            for (int slot = 0; slot < SLOTS; slot++)
                if (*gpu == '*' || atoi(gpu) == slot) store(verb[0], slot, key, value);
            return;
        }
    refuse_script(line);
}

static int folder = AT_FDCWD; /* that of the script: to look at it from there spares each call the whole path */
static const char *base = path;

/* With `lock` held, and `path` new. */
static void find_folder(void) {
    if (folder != AT_FDCWD) close(folder);
    folder = AT_FDCWD;
    base = path;
    char *slash = strrchr(path, '/');
    if (!slash || slash == path) return;
    *slash = 0;
    folder = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    *slash = '/';
    if (folder < 0) folder = AT_FDCWD;
    else base = slash + 1;
}

/* With `lock` held. */
static void reload(void) {
    struct stat now;
    if (!*path || fstatat(folder, base, &now, 0)) return; /* between two names of an atomic replace: keep what we have */
    if (now.st_size == seen_size && now.st_ino == seen_inode && now.st_mtim.tv_sec == seen_time.tv_sec &&
        now.st_mtim.tv_nsec == seen_time.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    seen_size = now.st_size;
    seen_inode = now.st_ino;
    seen_time = now.st_mtim;
    char line[512];
    unsigned entries = 0, size = 256;
    while (fgets(line, sizeof line, file)) entries += strchr(line, '*') ? SLOTS : 1;
    while (size < 2 * entries) size *= 2;
    if (size != table_size) {
        free(table);
        table = calloc(table_size = size, sizeof *table);
    } else memset(table, 0, size * sizeof *table);
    memset(of_verb, 0, sizeof of_verb);
    rewind(file);
    n_xids = 0;
    while (fgets(line, sizeof line, file)) parse(line);
    fclose(file);
}

/* Copies the value of a statement to `out` (may be NULL) and says whether it stands. */
static int find(char verb, int gpu, const char *key, char out[92]) {
    pthread_mutex_lock(&lock);
    Entry *e = table && of_verb[(unsigned char)verb] ? place(verb, gpu, key) : NULL;
    int found = e && e->verb;
    if (found && out) memcpy(out, e->value, sizeof e->value);
    pthread_mutex_unlock(&lock);
    return found;
}

static int code_of(const char *name) {
    for (unsigned i = 0; i < sizeof CODES / sizeof *CODES; i++)
        if (!strcmp(CODES[i].name, name)) return CODES[i].code;
    return UNKNOWN;
}

/* ---- devices, and what every call goes through ---- */

#define MIGS 7
typedef struct nvmlDevice_st { int slot, mig; } *nvmlDevice_t; /* mig: 0 the GPU itself, else place of an instance + 1 */
static struct nvmlDevice_st devices[SLOTS]; /* a handle points here: by slot, so that it survives a loss */
static struct nvmlDevice_st instances[SLOTS * MIGS];
static int listed[SLOTS], n_listed, users;  /* index -> slot as of nvmlInit */
static char driver[92];

static u64 now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000 + (u64)t.tv_nsec / 1000;
}

static nvmlReturn_t scripted(const char *what, int gpu) {
    char name[92];
    return find('e', gpu, what, name) ? code_of(name) : SUCCESS;
}

/* ---- what calls cost, and how many there were ---- */

typedef struct { char function[56]; u64 n, driver; } Calls; /* of the file named by `calls`: CALLS of them, unused ones empty */
#define CALLS 256
static Calls *calls;
static char calls_path[92];

/* With `lock` held: the counts live in a file that another process can read, and outlive this one. */
static void open_calls(void) {
    char name[92];
    Entry *e = table ? place('s', -1, "calls") : NULL;
    if (!e || !e->verb || !strcmp(calls_path, e->value)) return;
    if (calls) munmap(calls, CALLS * sizeof *calls);
    snprintf(name, sizeof name, "%s", e->value);
    snprintf(calls_path, sizeof calls_path, "%s", name);
    int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0 || ftruncate(file, CALLS * sizeof *calls)) refuse_script("calls: its file cannot be written");
    calls = mmap(NULL, CALLS * sizeof *calls, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (calls == MAP_FAILED) refuse_script("calls: its file cannot be mapped");
}

static void count_call(const char *function, unsigned driver_calls) {
    pthread_mutex_lock(&lock);
    open_calls();
    for (int i = 0; calls && i < CALLS; i++) {
        if (!*calls[i].function) snprintf(calls[i].function, sizeof calls[i].function, "%s", function);
        if (!strcmp(calls[i].function, function)) {
            calls[i].n++;
            calls[i].driver += driver_calls;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

/* `times` what one driver call of `function` costs. No lock is held meanwhile. */
static void pay(const char *function, int slot, unsigned times) {
    char cost[92];
    unsigned sleep_us = 0, spin_us = 0;
    if (find('c', slot, function, cost) || find('c', slot, "*", cost)) {
        char *rest;
        sleep_us = (unsigned)strtoul(cost, &rest, 10);
        spin_us = (unsigned)strtoul(rest, NULL, 10);
        if (sleep_us && times) usleep(sleep_us * times);
        for (u64 end = now_us() + (u64)spin_us * times; now_us() < end;) {}
    }
}

/* Counting, cost, blocking and errors of `function` for one slot (0 for calls about no device). */
static nvmlReturn_t act_for(const char *function, int slot, unsigned driver_calls) {
    pthread_mutex_lock(&lock);
    reload();
    pthread_mutex_unlock(&lock);
    count_call(function, driver_calls);
    pay(function, slot, driver_calls);
    while (find('b', slot, function, NULL)) {
        usleep(2000);
        pthread_mutex_lock(&lock);
        reload();
        pthread_mutex_unlock(&lock);
    }
    return scripted(function, slot);
}
static nvmlReturn_t act(const char *function, int slot) { return act_for(function, slot, 1); }

/* The version in the name of the file that this library was loaded from, as "580.95.05"; "" where it has none. */
static const char *own_version(void) {
    static char version[92];
    static int known;
    FILE *maps = known ? NULL : fopen("/proc/self/maps", "r");
    char line[4200];
    while (maps && !known && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char *name = strstr(line, "libnvidia-ml.so.");
        if (!name || sscanf(line, "%lx-%lx", &from, &to) != 2) continue;
        if ((unsigned long)(uintptr_t)own_version < from || (unsigned long)(uintptr_t)own_version >= to) continue;
        sscanf(name, "libnvidia-ml.so.%91[0-9.]", version);
        known = 1;
    }
    if (maps) fclose(maps);
    return version;
}

/* Why no call works: the driver was unloaded, say, or another version than this library's was loaded. */
static nvmlReturn_t down(void) {
    char code[92];
    if (find('s', -1, "library", code) && strcmp(code, own_version())) return LIB_RM_VERSION_MISMATCH;
    return find('s', -1, "down", code) ? code_of(code) : SUCCESS;
}

static nvmlReturn_t enter_system(const char *function) {
    if (!__atomic_load_n(&users, __ATOMIC_SEQ_CST)) return UNINITIALIZED;
    nvmlReturn_t r = act(function, 0);
    return r ? r : down();
}

static int is_lost(int slot) { return find('l', slot, "", NULL) || find('g', slot, "", NULL); }

static int mig_mode(int slot) {
    char value[92];
    return find('s', slot, "mig_mode", value) ? atoi(value) : 0;
}

/* The place of a MIG handle must hold an instance. */
static int is_handle(nvmlDevice_t device, int with_mig) {
    uintptr_t at = (uintptr_t)device - (uintptr_t)devices, mig = (uintptr_t)device - (uintptr_t)instances;
    if (at < sizeof devices) return at % sizeof *devices == 0;
    char key[32];
    if (!with_mig || mig >= sizeof instances || mig % sizeof *instances || !device->mig) return 0;
    snprintf(key, sizeof key, "mig.%d.uuid", device->mig - 1);
    return mig_mode(device->slot) && find('s', device->slot, key, NULL);
}

static nvmlReturn_t enter_for(const char *function, nvmlDevice_t device, unsigned driver_calls, int with_mig) {
    if (!__atomic_load_n(&users, __ATOMIC_SEQ_CST)) return UNINITIALIZED;
    if (!is_handle(device, with_mig)) return INVALID_ARGUMENT;
    nvmlReturn_t r = act_for(function, device->slot, driver_calls);
    if (!r && !is_handle(device, with_mig)) r = INVALID_ARGUMENT; /* the script may just have destroyed the instance */
    if (!r) r = down();
    return r ? r : is_lost(device->slot) ? GPU_IS_LOST : SUCCESS;
}
#define ENTER(device) do { nvmlReturn_t r_ = enter_for(__func__, device, 1, 0); if (r_) return r_; } while (0)
/* Of the functions that take a MIG instance too. */
#define ENTER_ANY(device) do { nvmlReturn_t r_ = enter_for(__func__, device, 1, 1); if (r_) return r_; } while (0)
#define NEED(pointer) do { if (!(pointer)) return INVALID_ARGUMENT; } while (0)

/* The value of a key, or why there is none. Negative numbers wrap as the callers' signed types expect. */
static nvmlReturn_t text(nvmlDevice_t device, const char *key, char out[92]) {
    char of_mig[76];
    if (device->mig) {
        snprintf(of_mig, sizeof of_mig, "mig.%d.%s", device->mig - 1, key);
        key = of_mig;
    }
    nvmlReturn_t r = scripted(key, device->slot);
    return r ? r : find('s', device->slot, key, out) ? SUCCESS : NOT_SUPPORTED;
}
/* A number between 0 and 1 that the same device, key and moment always give. */
static double chance(int slot, const char *key, u64 moment) {
    u64 x = moment * 0x9e3779b97f4a7c15ull + (u64)slot;
    while (*key) x = (x ^ (unsigned char)*key++) * 1099511628211ull;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9ull;
    return (double)(x >> 11) / 9007199254740992.0;
}

/* "LOW~HIGH/SECONDS/STEP" and "FIRST+PER_SECOND" as they stand now; what is neither stays as it is written. */
static double moving(int slot, const char *key, const char *value) {
    char *end;
    double low = strtod(value, &end), now = (double)now_us() / 1e6;
    if (*end == '+') return low + now * strtod(end + 1, NULL);
    if (*end != '~') return low;
    double high = strtod(end + 1, &end), seconds = *end == '/' ? strtod(end + 1, &end) : 1;
    double step = *end == '/' ? strtod(end + 1, &end) : 0, share = now / seconds - (double)(u64)(now / seconds);
    double from = chance(slot, key, (u64)(now / seconds)), to = chance(slot, key, (u64)(now / seconds) + 1);
    double found = low + (high - low) * (from + (to - from) * share);
    return step > 0 ? low + step * (double)(u64)((found - low) / step + 0.5) : found;
}
static nvmlReturn_t number(nvmlDevice_t device, const char *key, u64 *out) {
    char value[92];
    nvmlReturn_t r = text(device, key, value);
    if (r) return r;
    if (strpbrk(value + 1, "~+")) *out = (u64)moving(device->slot, key, value);
    else *out = *value == '-' ? (u64)strtoll(value, NULL, 0) : strtoull(value, NULL, 0);
    return r;
}
static nvmlReturn_t number32(nvmlDevice_t device, const char *key, unsigned *out) {
    u64 wide = 0;
    nvmlReturn_t r = number(device, key, &wide);
    if (!r) *out = (unsigned)wide;
    return r;
}
static nvmlReturn_t copy(const char *value, char *out, unsigned size) {
    if (!out) return INVALID_ARGUMENT;
    if (strlen(value) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

