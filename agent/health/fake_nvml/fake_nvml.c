/* A library with NVML's ABI, driven by one JSON state file (docs/fake-nvml.md).
 *
 * Every call reads the file named by REGROW_FAKE_NVML again when it has changed, so several processes see one world.
 * Nothing is random. Time enters only through counter ramps and, when the file has "now", not even there.
 * Struct layouts and symbol names are those of nvml.h; unknown symbols are simply absent, as in an old driver.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25, UNKNOWN = 999 };
enum { MAX_DEVICES = 64, KEY = 192 };
typedef unsigned int uint_;
typedef unsigned long long ull;
typedef struct device { char uuid[96]; } *nvmlDevice_t;

/* --- the state file, flattened: {"devices":[{"uuid":"x"}]} becomes devices.#=1, devices.0.uuid=x; null is kept --- */

struct pair { char *key, *value; };
static struct pair *pairs;
static size_t num_pairs, max_pairs;
static struct stat seen;
static int loaded, init_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[MAX_DEVICES];
static int num_handles;

static void put(const char *key, char *value) {
    if (num_pairs == max_pairs) {
        max_pairs = max_pairs ? 2 * max_pairs : 256;
        pairs = realloc(pairs, max_pairs * sizeof *pairs);
        if (!pairs) abort();
    }
    pairs[num_pairs].key = strdup(key);
    pairs[num_pairs++].value = value;
}

static int by_key(const void *a, const void *b) { return strcmp(((const struct pair *)a)->key, ((const struct pair *)b)->key); }

static const char *blank(const char *p) { return p ? p + strspn(p, " \t\r\n") : p; }

static const char *string(const char *p, char **out) { /* p is after the opening quote */
    char *text = malloc(strlen(p) + 1), *q = text;
    if (!text) abort();
    for (; *p && *p != '"'; p++) {
        if (*p == '\\' && p[1]) { p++; *q++ = *p == 'n' ? '\n' : *p == 't' ? '\t' : *p; }
        else *q++ = *p;
    }
    *q = 0;
    *out = text;
    return *p == '"' ? p + 1 : NULL;
}

static const char *value(const char *p, const char *path, int depth);

static const char *members(const char *p, const char *path, char close, int depth) {
    char inner[KEY], number[16];
    int n = 0;
    for (p = blank(p); p && *p && *p != close; n++) {
        char *name = NULL;
        if (close == '}') {
            if (*p != '"') return NULL;
            p = blank(string(p + 1, &name));
            if (!p || *p != ':') { free(name); return NULL; }
            p++;
        } else snprintf(number, sizeof number, "%d", n);
        snprintf(inner, sizeof inner, "%s%s%s", path, *path ? "." : "", name ? name : number);
        free(name);
        p = blank(value(blank(p), inner, depth + 1));
        if (p && *p == ',') p = blank(p + 1);
        else if (p && *p != close) return NULL;
    }
    if (!p || *p != close) return NULL;
    if (close == ']') {
        snprintf(inner, sizeof inner, "%s.#", path);
        snprintf(number, sizeof number, "%d", n);
        put(inner, strdup(number));
    }
    return p + 1;
}

static const char *value(const char *p, const char *path, int depth) {
    if (!p || depth > 12) return NULL;
    if (*p == '{') return members(p + 1, path, '}', depth);
    if (*p == '[') return members(p + 1, path, ']', depth);
    if (*p == '"') {
        char *text;
        p = string(p + 1, &text);
        put(path, text);
        return p;
    }
    size_t n = strcspn(p, ",]} \t\r\n");
    if (!n) return NULL;
    put(path, !strncmp(p, "true", n) ? strdup("1") : !strncmp(p, "false", n) ? strdup("0")
              : !strncmp(p, "null", n) ? NULL : strndup(p, n));
    return p + n;
}

static void forget(void) {
    for (size_t i = 0; i < num_pairs; i++) { free(pairs[i].key); free(pairs[i].value); }
    num_pairs = 0;
    loaded = 0;
}

static int reload(void) { /* 1: there is a state; a file that is not JSON counts as no driver */
    const char *path = getenv("REGROW_FAKE_NVML");
    struct stat now;
    if (!path || stat(path, &now)) { forget(); return 0; }
    if (loaded && now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec
        && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec) return 1;
    FILE *file = fopen(path, "r");
    if (!file || fstat(fileno(file), &now)) { if (file) fclose(file); forget(); return 0; } /* it may be newer than what stat saw */
    char *text = calloc(1, (size_t)now.st_size + 1);
    size_t got = text ? fread(text, 1, (size_t)now.st_size, file) : 0;
    fclose(file);
    forget();
    const char *end = got ? value(blank(text), "", 0) : NULL;
    free(text);
    if (!end) { forget(); return 0; }
    qsort(pairs, num_pairs, sizeof *pairs, by_key);
    seen = now;
    return loaded = 1;
}

static struct pair *find(const char *key) {
    struct pair wanted = { (char *)(size_t)key, NULL };
    return num_pairs ? bsearch(&wanted, pairs, num_pairs, sizeof *pairs, by_key) : NULL;
}

static struct pair *findf(const char *format, ...) {
    char key[KEY];
    va_list list;
    va_start(list, format);
    vsnprintf(key, sizeof key, format, list);
    va_end(list);
    return find(key);
}

static double number(struct pair *pair, double otherwise) { return pair && pair->value ? strtod(pair->value, NULL) : otherwise; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return number(find("now"), (double)t.tv_sec + (double)t.tv_nsec / 1e9);
}

static int listed(const char *prefix, const char *list, const char *fn) {
    int n = (int)number(findf("%s%s.#", prefix, list), 0);
    for (int i = 0; i < n; i++) {
        struct pair *one = findf("%s%s.%d", prefix, list, i);
        if (one && one->value && (!strcmp(one->value, "*") || !strcmp(one->value, fn))) return 1;
    }
    return 0;
}

/* --- looking things up for a device: fault overlay, device, defaults, built in ---------------------------------- */

static int num_listed(void) { return (int)number(find("devices.#"), 0); }

static void uuid_of(int i, char *out, size_t size) {
    struct pair *pair = findf("devices.%d.uuid", i);
    if (pair && pair->value) snprintf(out, size, "%s", pair->value);
    else snprintf(out, size, "GPU-fa4e0000-0000-4000-8000-%012d", i);
}

static int position(const char *uuid) {
    char one[96];
    for (int i = 0; i < num_listed(); i++) { uuid_of(i, one, sizeof one); if (!strcmp(one, uuid)) return i; }
    return -1;
}

static int visible(int nth) { /* position of the nth enumerated device, or -1 */
    int limit = (int)number(find("count"), 1e9);
    for (int i = 0, k = 0; i < num_listed(); i++) {
        if (number(findf("devices.%d.enumerated", i), 1) == 0) continue;
        if (k == nth) return k < limit ? i : -1;
        k++;
    }
    return -1;
}

static int faulty(int i) {
    struct pair *resets = findf("devices.%d.heals_after_resets", i), *reboots = findf("devices.%d.heals_after_reboots", i);
    if (resets && number(findf("devices.%d.resets", i), 0) >= number(resets, 0)) return 0;
    return !(reboots && number(find("reboots"), 0) >= number(reboots, 0));
}

static int lookup(int i, const char *key, const char *part, struct pair **out, char *path) {
    const char *forms[] = { "devices.%d.fault.%s%s", "devices.%d.%s%s", "defaults.%s%s" };
    for (int f = faulty(i) ? 0 : 1; f < 3; f++) {
        if (f < 2) snprintf(path, KEY, forms[f], i, key, part);
        else snprintf(path, KEY, forms[2], key, part);
        if ((*out = find(path))) return 1;
    }
    return 0;
}

static int get(int i, const char *key, double otherwise, double *out) { /* null: not supported; {"per_second"}: a ramp */
    char path[KEY];
    struct pair *pair;
    if (lookup(i, key, "", &pair, path)) {
        if (!pair->value) return NOT_SUPPORTED;
        *out = strtod(pair->value, NULL);
    } else if (lookup(i, key, ".per_second", &pair, path)) {
        char *cut = strrchr(path, '.');
        *cut = 0;
        *out = number(findf("%s.start", path), 0) + number(pair, 0) * (now() - number(findf("%s.since", path), 0));
        double most = number(findf("%s.max", path), 1e18);
        if (*out > most) *out = most;
    } else {
        if (otherwise < 0) return NOT_SUPPORTED;
        *out = otherwise;
    }
    return SUCCESS;
}

static int text(int i, const char *key, const char *otherwise, char *out, uint_ size) {
    char path[KEY];
    struct pair *pair;
    const char *found = otherwise;
    if (lookup(i, key, "", &pair, path)) { if (!pair->value) return NOT_SUPPORTED; found = pair->value; }
    if (strlen(found) + 1 > size) return INSUFFICIENT_SIZE;
    memcpy(out, found, strlen(found) + 1);
    return SUCCESS;
}

static void nap(double seconds) {
    struct timespec t = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };
    nanosleep(&t, NULL);
}

/* Takes the lock when it returns SUCCESS; hangs, delays, scripted errors and lost devices are decided here. */
static int enter(const char *fn, nvmlDevice_t device, int *i) {
    char prefix[48] = "";
    for (int waited = 0;;) {
        pthread_mutex_lock(&lock);
        int there = reload(), code = SUCCESS;
        if (!there) code = DRIVER_NOT_LOADED;
        else if (device) {
            *i = position(device->uuid);
            if (*i < 0) code = GPU_IS_LOST;
            else snprintf(prefix, sizeof prefix, "devices.%d.", *i);
        }
        double delay = number(findf("delay_seconds.%s", fn), 0);
        int hung = there && (listed("", "hang", fn) || (*prefix && faulty(*i) && listed(prefix, "hang", fn)));
        if (!hung && (waited || delay <= 0)) {
            struct pair *scripted = findf("errors.%s", fn);
            char path[KEY];
            if (!scripted && *prefix) lookup(*i, "errors.", fn, &scripted, path);
            double lost = 0;
            if (code == SUCCESS && *prefix) get(*i, "lost", 0, &lost);
            if (scripted) code = (int)number(scripted, 0);
            else if (lost != 0) code = lost > 1 ? (int)lost : GPU_IS_LOST;
            else if (code == SUCCESS && !init_count && strncmp(fn, "nvmlInit", 8)) code = UNINITIALIZED;
            if (code != SUCCESS) pthread_mutex_unlock(&lock);
            return code;
        }
        pthread_mutex_unlock(&lock);
        nap(hung ? 0.02 : delay);
        waited = !hung;
    }
}

static int leave(int code) { pthread_mutex_unlock(&lock); return code; }

static int read_uint(const char *fn, nvmlDevice_t device, const char *key, double otherwise, uint_ *out) {
    int i, code;
    double got = 0;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter(fn, device, &i))) return code;
    if ((code = get(i, key, otherwise, &got)) == SUCCESS) *out = (uint_)got;
    return leave(code);
}

static int read_ull(const char *fn, nvmlDevice_t device, const char *key, double otherwise, ull *out) {
    int i, code;
    double got = 0;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter(fn, device, &i))) return code;
    if ((code = get(i, key, otherwise, &got)) == SUCCESS) *out = (ull)got;
    return leave(code);
}

static int read_text(const char *fn, nvmlDevice_t device, const char *key, const char *otherwise, char *out, uint_ size) {
    int i, code;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter(fn, device, &i))) return code;
    return leave(text(i, key, otherwise, out, size));
}

/* --- system ------------------------------------------------------------------------------------------------------ */

int nvmlInitWithFlags(uint_ flags) {
    int code = enter("nvmlInitWithFlags", NULL, NULL);
    (void)flags;
    if (code) return code;
    init_count++;
    return leave(SUCCESS);
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    int code = enter("nvmlShutdown", NULL, NULL);
    if (code) return code;
    init_count--;
    return leave(SUCCESS);
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case 0: return "Success"; case 1: return "Uninitialized"; case 2: return "Invalid Argument"; case 3: return "Not Supported";
    case 4: return "Insufficient Permissions"; case 6: return "Not Found"; case 7: return "Insufficient Size";
    case 9: return "Driver Not Loaded"; case 10: return "Timeout"; case 13: return "Function Not Found";
    case 15: return "GPU is lost"; case 16: return "GPU requires reset"; case 18: return "Driver/library version mismatch";
    case 999: return "Unknown Error"; default: return "Other Error";
    }
}

static int system_text(const char *fn, const char *key, const char *otherwise, char *out, uint_ size) {
    int code = enter(fn, NULL, NULL);
    if (code) return code;
    struct pair *pair = find(key);
    const char *found = pair && pair->value ? pair->value : otherwise;
    if (strlen(found) + 1 > size) return leave(INSUFFICIENT_SIZE);
    strcpy(out, found);
    return leave(SUCCESS);
}
int nvmlSystemGetDriverVersion(char *out, uint_ size) {
    return system_text("nvmlSystemGetDriverVersion", "driver_version", "570.124.06", out, size);
}
int nvmlSystemGetNVMLVersion(char *out, uint_ size) {
    return system_text("nvmlSystemGetNVMLVersion", "nvml_version", "12.570.124.06", out, size);
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    int code = enter("nvmlSystemGetCudaDriverVersion_v2", NULL, NULL);
    if (code) return code;
    *out = (int)number(find("cuda_driver_version"), 12080);
    return leave(SUCCESS);
}
int nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

/* --- handles ----------------------------------------------------------------------------------------------------- */

static nvmlDevice_t handle_of(int i) {
    char uuid[96];
    uuid_of(i, uuid, sizeof uuid);
    for (int k = 0; k < num_handles; k++) if (!strcmp(devices[k].uuid, uuid)) return &devices[k];
    if (num_handles == MAX_DEVICES) return NULL;
    strcpy(devices[num_handles].uuid, uuid);
    return &devices[num_handles++];
}

static int give_handle(int i, nvmlDevice_t *out) {
    double lost = 0;
    if (i < 0) return NOT_FOUND;
    get(i, "lost", 0, &lost);
    if (lost != 0) return lost > 1 ? (int)lost : GPU_IS_LOST;
    *out = handle_of(i);
    return *out ? SUCCESS : UNKNOWN;
}

int nvmlDeviceGetCount_v2(uint_ *out) {
    int code = enter("nvmlDeviceGetCount_v2", NULL, NULL), n = 0;
    if (code) return code;
    while (visible(n) >= 0) n++;
    *out = (uint_)n;
    return leave(SUCCESS);
}
int nvmlDeviceGetHandleByIndex_v2(uint_ index, nvmlDevice_t *out) {
    int code = enter("nvmlDeviceGetHandleByIndex_v2", NULL, NULL);
    if (code) return code;
    int i = visible((int)index);
    return leave(i < 0 ? INVALID_ARGUMENT : give_handle(i, out));
}
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
    int code = enter("nvmlDeviceGetHandleByUUID", NULL, NULL);
    return code ? code : leave(give_handle(position(uuid), out));
}
static void bus_of(int i, char *out, size_t size) {
    char usual[32];
    snprintf(usual, sizeof usual, "00000000:%02X:00.0", (0x1b + 0x10 * i) & 0xff);
    if (text(i, "pci_bus_id", usual, out, (uint_)size)) snprintf(out, size, "%s", usual);
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *out) {
    char one[32];
    int code = enter("nvmlDeviceGetHandleByPciBusId_v2", NULL, NULL), found = -1;
    if (code) return code;
    for (int i = 0; i < num_listed(); i++) { bus_of(i, one, sizeof one); if (!strcasecmp(one, bus)) found = i; }
    return leave(give_handle(found, out));
}
int nvmlDeviceGetIndex(nvmlDevice_t device, uint_ *out) {
    int i, code, n = 0;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetIndex", device, &i))) return code;
    while (visible(n) >= 0 && visible(n) != i) n++;
    *out = (uint_)n;
    return leave(SUCCESS);
}
int nvmlDeviceGetUUID(nvmlDevice_t device, char *out, uint_ size) {
    int i, code;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetUUID", device, &i))) return code;
    snprintf(out, size, "%s", device->uuid);
    return leave(SUCCESS);
}
int nvmlDeviceGetName(nvmlDevice_t device, char *out, uint_ size) {
    return read_text("nvmlDeviceGetName", device, "name", "NVIDIA H100 80GB HBM3 (fake)", out, size);
}
int nvmlDeviceGetSerial(nvmlDevice_t device, char *out, uint_ size) {
    char usual[32];
    int i, code;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetSerial", device, &i))) return code;
    snprintf(usual, sizeof usual, "16500%08d", i);
    return leave(text(i, "serial", usual, out, size));
}
int nvmlDeviceGetMinorNumber(nvmlDevice_t device, uint_ *out) {
    int i, code;
    double got = 0;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetMinorNumber", device, &i))) return code;
    if (!(code = get(i, "minor", i, &got))) *out = (uint_)got;
    return leave(code);
}

struct pci { char legacy[16]; uint_ domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci *out) {
    int i, code;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetPciInfo_v3", device, &i))) return code;
    memset(out, 0, sizeof *out);
    bus_of(i, out->bus_id, sizeof out->bus_id);
    sscanf(out->bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff, out->device & 0xff);
    out->id = 0x233010de;
    return leave(SUCCESS);
}

/* --- plain readings ---------------------------------------------------------------------------------------------- */

#define READ_UINT(fn, key, otherwise) \
    int fn(nvmlDevice_t device, uint_ *out) { return read_uint(#fn, device, key, otherwise, out); }
#define READ_ULL(fn, key, otherwise) \
    int fn(nvmlDevice_t device, ull *out) { return read_ull(#fn, device, key, otherwise, out); }

READ_UINT(nvmlDeviceGetPowerUsage, "power_milliwatts", 120000)
READ_UINT(nvmlDeviceGetEnforcedPowerLimit, "power_limit_milliwatts", 700000)
READ_UINT(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation", 5)
READ_UINT(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
READ_UINT(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_max_generation", 5)
READ_UINT(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max_width", 16)
READ_UINT(nvmlDeviceGetPcieReplayCounter, "pcie_replays", 0)
READ_UINT(nvmlDeviceGetPersistenceMode, "persistence_mode", 1)
READ_UINT(nvmlDeviceGetPerformanceState, "performance_state", 0)
READ_UINT(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pages_pending", 0)
READ_ULL(nvmlDeviceGetCurrentClocksEventReasons, "clock_event_reasons", 0)
READ_ULL(nvmlDeviceGetCurrentClocksThrottleReasons, "clock_event_reasons", 0)
READ_ULL(nvmlDeviceGetTotalEnergyConsumption, "energy_millijoules", 0)

int nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, uint_ *out) {
    return sensor ? NOT_SUPPORTED : read_uint("nvmlDeviceGetTemperature", device, "temperature", 45, out);
}
struct temperature { uint_ version; int sensor, value; };
int nvmlDeviceGetTemperatureV(nvmlDevice_t device, struct temperature *out) {
    uint_ got = 0;
    if (!out || out->version != 0x100000C) return VERSION_MISMATCH;
    int code = read_uint("nvmlDeviceGetTemperatureV", device, "temperature", 45, &got);
    out->value = (int)got;
    return code;
}
int nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, int kind, uint_ *out) {
    static const char *keys[] = { "temperature_shutdown", "temperature_slowdown", "temperature_memory_max", "temperature_gpu_max" };
    static const double usual[] = { 95, 90, 95, 87 };
    if (kind < 0 || kind > 3) return NOT_SUPPORTED;
    return read_uint("nvmlDeviceGetTemperatureThreshold", device, keys[kind], usual[kind], out);
}
struct margin { uint_ version; int value; };
int nvmlDeviceGetMarginTemperature(nvmlDevice_t device, struct margin *out) {
    int i, code;
    double got = 0;
    if (!device || !out || out->version != 0x1000008) return VERSION_MISMATCH;
    if ((code = enter("nvmlDeviceGetMarginTemperature", device, &i))) return code;
    if (!(code = get(i, "temperature_margin", 42, &got))) out->value = (int)got;
    return leave(code);
}
static const char *clock_keys[] = { "clock_graphics", "clock_sm", "clock_memory", "clock_video" };
static const char *max_clock_keys[] = { "max_clock_graphics", "max_clock_sm", "max_clock_memory", "max_clock_video" };
int nvmlDeviceGetClockInfo(nvmlDevice_t device, int kind, uint_ *out) {
    if (kind < 0 || kind > 3) return INVALID_ARGUMENT;
    return read_uint("nvmlDeviceGetClockInfo", device, clock_keys[kind], kind == 2 ? 2619 : 1980, out);
}
int nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int kind, uint_ *out) {
    if (kind < 0 || kind > 3) return INVALID_ARGUMENT;
    return read_uint("nvmlDeviceGetMaxClockInfo", device, max_clock_keys[kind], kind == 2 ? 2619 : 1980, out);
}
struct memory { ull total, free, used; };
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *out) {
    int i, code;
    double total = 0, used = 0;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetMemoryInfo", device, &i))) return code;
    code = get(i, "memory_bytes", 85520809984.0, &total);
    if (!code) code = get(i, "memory_used_bytes", 0, &used);
    if (!code) { out->total = (ull)total; out->used = (ull)used; out->free = out->total - out->used; }
    return leave(code);
}
struct memory2 { uint_ version; ull total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory2 *out) {
    struct memory plain = { 0 };
    if (!out || out->version != 0x2000028) return VERSION_MISMATCH;
    int code = nvmlDeviceGetMemoryInfo(device, &plain);
    if (!code) { out->total = plain.total; out->reserved = 0; out->free = plain.free; out->used = plain.used; }
    return code;
}
struct utilization { uint_ gpu, memory; };
int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *out) {
    int i, code;
    double gpu = 0, memory = 0;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetUtilizationRates", device, &i))) return code;
    code = get(i, "utilization", 0, &gpu);
    if (!code) code = get(i, "memory_utilization", 0, &memory);
    if (!code) { out->gpu = (uint_)gpu; out->memory = (uint_)memory; }
    return leave(code);
}
struct violation { ull reference, violation; };
int nvmlDeviceGetViolationStatus(nvmlDevice_t device, int policy, struct violation *out) {
    static const char *keys[] = { "violation_power_ns", "violation_thermal_ns" };
    if (!out || policy < 0 || policy > 1) return NOT_SUPPORTED;
    out->reference = (ull)(now() * 1e6);
    return read_ull("nvmlDeviceGetViolationStatus", device, keys[policy], 0, &out->violation);
}
static int two(const char *fn, nvmlDevice_t device, const char *a, const char *b, double otherwise, uint_ *x, uint_ *y) {
    int code = read_uint(fn, device, a, otherwise, x);
    return code ? code : read_uint(fn, device, b, otherwise, y);
}
int nvmlDeviceGetEccMode(nvmlDevice_t device, uint_ *current, uint_ *pending) {
    return two("nvmlDeviceGetEccMode", device, "ecc_mode", "ecc_mode_pending", 1, current, pending);
}
int nvmlDeviceGetMigMode(nvmlDevice_t device, uint_ *current, uint_ *pending) {
    return two("nvmlDeviceGetMigMode", device, "mig_mode", "mig_mode_pending", 0, current, pending);
}

/* --- memory errors ----------------------------------------------------------------------------------------------- */

int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int kind, int counter, ull *out) {
    static const char *keys[] = { "ecc_corrected_volatile", "ecc_corrected_aggregate", "ecc_uncorrected_volatile", "ecc_uncorrected_aggregate" };
    if (kind < 0 || kind > 1 || counter < 0 || counter > 1) return INVALID_ARGUMENT;
    return read_ull("nvmlDeviceGetTotalEccErrors", device, keys[2 * kind + counter], 0, out);
}
struct sram { uint_ version; ull counts[11]; uint_ exceeded; };
int nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, struct sram *out) {
    static const char *keys[] = { "sram_aggregate_parity", "sram_aggregate_secded", "sram_aggregate_corrected", "sram_volatile_parity",
                                  "sram_volatile_secded", "sram_volatile_corrected" };
    int i, code;
    double got = 0;
    if (!device || !out || out->version != 0x1000068) return VERSION_MISMATCH;
    if ((code = enter("nvmlDeviceGetSramEccErrorStatus", device, &i))) return code;
    memset(out->counts, 0, sizeof out->counts);
    for (int k = 0; k < 6 && !code; k++) if (!(code = get(i, keys[k], 0, &got))) out->counts[k] = (ull)got;
    if (!code && !(code = get(i, "sram_threshold_exceeded", 0, &got))) out->exceeded = (uint_)got;
    return leave(code);
}
static int remapped(const char *fn, nvmlDevice_t device, uint_ out[6]) {
    static const char *keys[] = { "remapped_correctable", "remapped_correctable_inactive", "remapped_uncorrectable",
                                  "remapped_uncorrectable_inactive", "remap_pending", "remap_failure" };
    int i, code;
    double got = 0;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter(fn, device, &i))) return code;
    for (int k = 0; k < 6 && !code; k++) if (!(code = get(i, keys[k], 0, &got))) out[k] = (uint_)got;
    return leave(code);
}
int nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, uint_ *out) { return remapped("nvmlDeviceGetRemappedRows_v2", device, out); }
int nvmlDeviceGetRemappedRows(nvmlDevice_t device, uint_ *correctable, uint_ *uncorrectable, uint_ *pending, uint_ *failure) {
    uint_ all[6] = { 0 };
    int code = remapped("nvmlDeviceGetRemappedRows", device, all);
    if (code) return code;
    *correctable = all[0]; *uncorrectable = all[2]; *pending = all[4]; *failure = all[5];
    return SUCCESS;
}
int nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, int cause, uint_ *count, ull *pages, ull *times) {
    uint_ have = 0;
    int code = read_uint("nvmlDeviceGetRetiredPages_v2", device, cause ? "retired_pages_dbe" : "retired_pages_sbe", -1, &have);
    if (code) return code;
    uint_ room = *count;
    *count = have;
    if (!pages || room < have) return have ? INSUFFICIENT_SIZE : SUCCESS;
    for (uint_ k = 0; k < have; k++) { pages[k] = 0x1000ull * (k + 1); times[k] = 0; }
    return SUCCESS;
}
struct repair { uint_ version, channel, tpc; };
int nvmlDeviceGetRepairStatus(nvmlDevice_t device, struct repair *out) {
    if (!out || out->version != 0x100000C) return VERSION_MISMATCH;
    return two("nvmlDeviceGetRepairStatus", device, "channel_repair_pending", "tpc_repair_pending", 0, &out->channel, &out->tpc);
}

/* --- links ------------------------------------------------------------------------------------------------------- */

static int link_get(int i, uint_ link, const char *key, double otherwise, double *out) {
    char path[64];
    double links = 0;
    int code = get(i, "num_nvlinks", 18, &links);
    if (code) return code;
    if (link >= (uint_)links) return INVALID_ARGUMENT;
    snprintf(path, sizeof path, "nvlinks.%u.%s", link, key);
    return get(i, path, otherwise, out);
}
int nvmlDeviceGetNvLinkState(nvmlDevice_t device, uint_ link, uint_ *out) {
    int i, code;
    double got = 0;
    if (!device || !out) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetNvLinkState", device, &i))) return code;
    if (!(code = link_get(i, link, "up", 1, &got))) *out = (uint_)got;
    return leave(code);
}
int nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, uint_ link, int counter, ull *out) {
    static const char *keys[] = { "replay", "recovery", "crc_flit", "crc_data", "ecc_data" };
    int i, code;
    double got = 0;
    if (!device || !out || counter < 0 || counter > 4) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetNvLinkErrorCounter", device, &i))) return code;
    if (!(code = link_get(i, link, keys[counter], 0, &got))) *out = (ull)got;
    return leave(code);
}
struct fabric { uint_ version; unsigned char cluster[16]; int status; uint_ clique; unsigned char state; uint_ mask; unsigned char summary; };
int nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, struct fabric *out) {
    int i, code;
    double state = 0, mask = 0, summary = 0, status = 0;
    if (!device || !out || (out->version != 0x3000028 && out->version != 0x2000024)) return VERSION_MISMATCH;
    if ((code = enter("nvmlDeviceGetGpuFabricInfoV", device, &i))) return code;
    code = get(i, "fabric_state", 3, &state);
    if (!code) code = get(i, "fabric_status", 0, &status);
    if (!code) code = get(i, "fabric_health_mask", 0, &mask);
    if (!code) code = get(i, "fabric_health_summary", 1, &summary);
    if (!code) {
        out->state = (unsigned char)state; out->status = (int)status; out->mask = (uint_)mask; out->clique = 0;
        memset(out->cluster, 0xfa, sizeof out->cluster);
        if (out->version == 0x3000028) out->summary = (unsigned char)summary;
    }
    return leave(code);
}

/* --- field values ------------------------------------------------------------------------------------------------ */

struct field { uint_ id, scope; long long at, latency; int kind, code; union { double d; uint_ ui; ull u; long long s; int i; } value; };
static const struct { uint_ id; const char *key; int link; double otherwise; } known_fields[] = {
    { 82, "memory_temperature", 0, 50 }, { 94, "pcie_replays", 0, 0 }, { 95, "pcie_replay_rollovers", 0, 0 },
    { 142, "remapped_correctable", 0, 0 }, { 143, "remapped_uncorrectable", 0, 0 }, { 144, "remap_pending", 0, 0 },
    { 145, "remap_failure", 0, 0 }, { 91, "num_nvlinks", 0, 18 }, { 161, "replay", 1, 0 }, { 162, "recovery", 1, 0 },
    { 163, "crc_flit", 1, 0 }, { 208, "receive_errors", 1, 0 }, { 211, "integrity_errors", 1, 0 }, { 213, "recovery_successful", 1, 0 },
    { 214, "recovery_failed", 1, 0 }, { 215, "recovery_events", 1, 0 }, { 219, "effective_errors", 1, 0 }, { 221, "symbol_errors", 1, 0 },
    { 173, "pcie_correctable_errors", 0, 0 }, { 174, "pcie_naks_received", 0, 0 }, { 175, "pcie_receiver_errors", 0, 0 },
    { 176, "pcie_bad_tlp", 0, 0 }, { 177, "pcie_naks_sent", 0, 0 }, { 178, "pcie_bad_dllp", 0, 0 }, { 179, "pcie_nonfatal_errors", 0, 0 },
    { 180, "pcie_fatal_errors", 0, 0 }, { 181, "pcie_unsupported_requests", 0, 0 }, { 182, "pcie_lcrc_errors", 0, 0 },
    { 183, "pcie_lane_errors", 0, 0 }, { 74, "throttle_power_ns", 0, 0 }, { 230, "recovery_action", 0, 0 },
    { 269, "throttle_sw_thermal_ns", 0, 0 }, { 270, "throttle_hw_thermal_ns", 0, 0 }, { 271, "throttle_power_brake_ns", 0, 0 },
};
static void one_field(int i, struct field *field) {
    char path[64];
    double got = 0;
    field->at = (long long)(now() * 1e6);
    field->latency = 0;
    field->kind = 3;
    field->value.u = 0;
    snprintf(path, sizeof path, field->scope ? "fields.%u:%u" : "fields.%u", field->id, field->scope);
    field->code = get(i, path, -1, &got);
    if (field->code) {
        for (size_t k = 0; k < sizeof known_fields / sizeof *known_fields; k++) {
            if (known_fields[k].id != field->id) continue;
            field->code = known_fields[k].link ? link_get(i, field->scope, known_fields[k].key, known_fields[k].otherwise, &got)
                                               : get(i, known_fields[k].key, known_fields[k].otherwise, &got);
        }
    }
    if (!field->code) field->value.u = (ull)got;
}
int nvmlDeviceGetFieldValues(nvmlDevice_t device, int n, struct field *fields) {
    int i, code;
    if (!device || !fields) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetFieldValues", device, &i))) return code;
    for (int k = 0; k < n; k++) one_field(i, &fields[k]);
    return leave(SUCCESS);
}

/* --- processes --------------------------------------------------------------------------------------------------- */

struct process { uint_ pid; ull memory; uint_ gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, uint_ *count, struct process *out) {
    int i, code;
    char path[KEY];
    struct pair *pair;
    if (!device || !count) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceGetComputeRunningProcesses_v3", device, &i))) return code;
    uint_ have = lookup(i, "processes", ".#", &pair, path) ? (uint_)number(pair, 0) : 0, room = *count;
    *count = have;
    if (have && (!out || room < have)) return leave(INSUFFICIENT_SIZE);
    for (uint_ k = 0; k < have; k++) {
        double pid = 0, memory = 0;
        snprintf(path, sizeof path, "processes.%u", k);
        if (get(i, path, -1, &pid)) {
            snprintf(path, sizeof path, "processes.%u.pid", k);
            get(i, path, 0, &pid);
            snprintf(path, sizeof path, "processes.%u.memory_bytes", k);
            get(i, path, 0, &memory);
        }
        out[k] = (struct process){ (uint_)pid, (ull)memory, 0xffffffffu, 0xffffffffu };
    }
    return leave(SUCCESS);
}

/* --- events: one log in the file, a cursor per event set ----------------------------------------------------------- */

struct watch { char uuid[96]; ull mask; };
struct event_set { double cursor; int num; struct watch watches[MAX_DEVICES]; };
struct event { nvmlDevice_t device; ull type, data; uint_ gpu_instance, compute_instance; };

int nvmlEventSetCreate(struct event_set **out) {
    int code = enter("nvmlEventSetCreate", NULL, NULL);
    if (code) return code;
    struct event_set *set = calloc(1, sizeof *set);
    const char *from = getenv("REGROW_FAKE_NVML_CURSOR");
    int n = (int)number(find("events.#"), 0);
    if (from) set->cursor = strtod(from, NULL);
    else if (n) set->cursor = number(findf("events.%d.seq", n - 1), n);
    *out = set;
    return leave(SUCCESS);
}
int nvmlEventSetFree(struct event_set *set) { free(set); return SUCCESS; }
int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, ull *out) {
    return read_ull("nvmlDeviceGetSupportedEventTypes", device, "event_types", 0xf28b, out);
}
int nvmlDeviceRegisterEvents(nvmlDevice_t device, ull types, struct event_set *set) {
    int i, code;
    if (!device || !set) return INVALID_ARGUMENT;
    if ((code = enter("nvmlDeviceRegisterEvents", device, &i))) return code;
    if (set->num == MAX_DEVICES) return leave(UNKNOWN);
    struct watch *watch = &set->watches[set->num++];
    strcpy(watch->uuid, device->uuid);
    watch->mask = types;
    return leave(SUCCESS);
}
static int next_event(struct event_set *set, struct event *out) {
    int n = (int)number(find("events.#"), 0);
    for (int e = 0; e < n; e++) {
        double seq = number(findf("events.%d.seq", e), e + 1);
        if (seq <= set->cursor) continue;
        set->cursor = seq;
        struct pair *who = findf("events.%d.device", e);
        ull type = (ull)number(findf("events.%d.type", e), 8);
        int i = who && who->value ? position(who->value) : -1;
        for (int w = 0; w < set->num && i >= 0; w++) {
            if (strcmp(set->watches[w].uuid, who->value) || !(set->watches[w].mask & type)) continue;
            *out = (struct event){ handle_of(i), type, (ull)number(findf("events.%d.data", e), 0), 0xffffffffu, 0xffffffffu };
            return 1;
        }
    }
    return 0;
}
int nvmlEventSetWait_v2(struct event_set *set, struct event *out, uint_ timeout_ms) {
    if (!set || !out) return INVALID_ARGUMENT;
    for (uint_ waited = 0;; waited += 10) {
        int code = enter("nvmlEventSetWait_v2", NULL, NULL);
        if (code) return code;
        int found = next_event(set, out);
        leave(SUCCESS);
        if (found) return SUCCESS;
        if (waited >= timeout_ms) return TIMEOUT;
        nap(0.01);
    }
}
int nvmlEventSetWait(struct event_set *set, struct event *out, uint_ timeout_ms) { return nvmlEventSetWait_v2(set, out, timeout_ms); }
