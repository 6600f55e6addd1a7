/* Blocks of shard files: read, their xxh3_128 taken while they are in the processor's cache, and the wanted parts put where they belong.

   The digest follows the published description of XXH3 (128 bits, seed 0, inputs over 240 bytes): eight 64-bit lanes take stripes of
   64 bytes, are scrambled after every 1024 bytes, and are folded in the end. */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STRIPE 64
#define GROUP 1024
#define STEP (128 << 10)
#define PAGE 4096
#define STREAM_BYTES (64 << 10)  /* smaller targets may as well stay in the cache */
#define GIVE_BACK_BYTES (8 << 20)
#define CACHESTAT 451            /* the system call has this number on all architectures; older kernels refuse it */
#define MAX_AXES 8

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90,
    0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d,
    0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28,
    0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38,
    0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f,
    0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55,
    0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45,
    0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
static const uint64_t P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;

static uint64_t load64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value; /* little-endian machines only: the library is not used on others */
}

static void accumulate(uint64_t *lanes, const uint8_t *from, const uint8_t *secret, size_t stripes)
{
    for (size_t n = 0; n < stripes; n++, from += STRIPE, secret += 8)
        for (int lane = 0; lane < 8; lane++) {
            uint64_t value = load64(from + 8 * lane), key = value ^ load64(secret + 8 * lane);
            lanes[lane ^ 1] += value;
            lanes[lane] += (key & 0xFFFFFFFFu) * (key >> 32);
        }
}

/* What becomes of bytes whose digest is taken. The very bytes that were digested are stored: a mapped file may change meanwhile. */
enum { LEAVE, STORE, STREAM };

/* Whole groups of 1024 bytes into the digest, and to `to` unless they are left; STREAM: past the caches, `to` at a multiple of 64. */
typedef void groups_fn(uint64_t *lanes, const uint8_t *from, size_t groups, uint8_t *to, int how);

static void groups_plain(uint64_t *lanes, const uint8_t *from, size_t groups, uint8_t *to, int how)
{
    uint8_t held[GROUP];
    for (; groups; groups--, from += GROUP) {
        const uint8_t *data = from;
        if (how != LEAVE) {
            memcpy(held, from, GROUP);
            memcpy(to, held, GROUP);
            to += GROUP;
            data = held;
        }
        accumulate(lanes, data, SECRET, GROUP / STRIPE);
        for (int lane = 0; lane < 8; lane++)
            lanes[lane] = (lanes[lane] ^ (lanes[lane] >> 47) ^ load64(SECRET + 128 + 8 * lane)) * P32_1;
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void groups_avx2(uint64_t *lanes, const uint8_t *from, size_t groups, uint8_t *to, int how)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)lanes), high = _mm256_loadu_si256((const __m256i *)(lanes + 4));
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    for (; groups; groups--) {
        for (int n = 0; n < GROUP / STRIPE; n++, from += STRIPE) {
            _mm_prefetch((const char *)from + 4096, _MM_HINT_T0);
            __m256i a = _mm256_loadu_si256((const __m256i *)from), b = _mm256_loadu_si256((const __m256i *)(from + 32));
            __m256i ka = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(SECRET + 8 * n)));
            __m256i kb = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(SECRET + 8 * n + 32)));
            if (how == STREAM) {
                _mm256_stream_si256((__m256i *)to, a);
                _mm256_stream_si256((__m256i *)(to + 32), b);
                to += STRIPE;
            } else if (how == STORE) {
                _mm256_storeu_si256((__m256i *)to, a);
                _mm256_storeu_si256((__m256i *)(to + 32), b);
                to += STRIPE;
            }
            low = _mm256_add_epi64(low, _mm256_shuffle_epi32(a, _MM_SHUFFLE(1, 0, 3, 2)));
            high = _mm256_add_epi64(high, _mm256_shuffle_epi32(b, _MM_SHUFFLE(1, 0, 3, 2)));
            low = _mm256_add_epi64(low, _mm256_mul_epu32(ka, _mm256_srli_epi64(ka, 32)));
            high = _mm256_add_epi64(high, _mm256_mul_epu32(kb, _mm256_srli_epi64(kb, 32)));
        }
        low = _mm256_xor_si256(low, _mm256_srli_epi64(low, 47));
        high = _mm256_xor_si256(high, _mm256_srli_epi64(high, 47));
        low = _mm256_xor_si256(low, _mm256_loadu_si256((const __m256i *)(SECRET + 128)));
        high = _mm256_xor_si256(high, _mm256_loadu_si256((const __m256i *)(SECRET + 160)));
        low = _mm256_add_epi64(_mm256_mul_epu32(low, prime), _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(low, 32), prime), 32));
        high = _mm256_add_epi64(_mm256_mul_epu32(high, prime), _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(high, 32), prime), 32));
    }
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
}

__attribute__((target("avx512f"))) static void groups_avx512(uint64_t *lanes, const uint8_t *from, size_t groups, uint8_t *to, int how)
{
    __m512i sum = _mm512_loadu_si512(lanes);
    const __m512i prime = _mm512_set1_epi32((int)P32_1);
    for (; groups; groups--) {
        for (int n = 0; n < GROUP / STRIPE; n++, from += STRIPE) {
            _mm_prefetch((const char *)from + 4096, _MM_HINT_T0);
            __m512i value = _mm512_loadu_si512(from);
            __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(SECRET + 8 * n));
            if (how == STREAM) {
                _mm512_stream_si512((void *)to, value);
                to += STRIPE;
            } else if (how == STORE) {
                _mm512_storeu_si512(to, value);
                to += STRIPE;
            }
            sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2)));
            sum = _mm512_add_epi64(sum, _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32)));
        }
        sum = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
        sum = _mm512_xor_si512(sum, _mm512_loadu_si512(SECRET + 128));
        sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32));
    }
    _mm512_storeu_si512(lanes, sum);
}
#endif

static groups_fn *best_groups(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return groups_avx512;
    if (__builtin_cpu_supports("avx2"))
        return groups_avx2;
#endif
    return groups_plain;
}

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merge(const uint64_t *lanes, const uint8_t *secret, uint64_t start)
{
    for (int pair = 0; pair < 4; pair++)
        start += fold(lanes[2 * pair] ^ load64(secret + 16 * pair), lanes[2 * pair + 1] ^ load64(secret + 16 * pair + 8));
    start ^= start >> 37;
    start *= 0x165667919E3779F9u;
    return start ^ (start >> 32);
}

static void start_lanes(uint64_t *lanes)
{
    const uint64_t first[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(lanes, first, sizeof first);
}

/* The last 1 to 1024 bytes, before which there are at least 64 more bytes of the input where `rest` is under 64. */
static void finish(uint64_t *lanes, const uint8_t *from, size_t rest, uint64_t total, uint8_t *digest)
{
    accumulate(lanes, from, SECRET, (rest - 1) / STRIPE);
    accumulate(lanes, from + rest - STRIPE, SECRET + 192 - STRIPE - 7, 1);
    uint64_t halves[2] = {merge(lanes, SECRET + 192 - STRIPE - 11, ~(total * P64_2)), merge(lanes, SECRET + 11, total * P64_1)};
    for (int index = 0; index < 16; index++)
        digest[index] = (uint8_t)(halves[index / 8] >> (56 - 8 * (index % 8)));
}

/* xxh3_128 of over 240 bytes, most significant byte first. */
void regrow_digest(const uint8_t *from, size_t bytes, uint8_t *digest)
{
    uint64_t lanes[8];
    size_t groups = (bytes - 1) / GROUP;
    start_lanes(lanes);
    best_groups()(lanes, from, groups, NULL, LEAVE);
    finish(lanes, from + groups * GROUP, bytes - groups * GROUP, bytes, digest);
}

/* Past the caches: what is restored is not read again soon, and ordinary stores would first read each line of the target. */
static void put(char *to, const char *from, size_t bytes)
{
#if defined(__SSE2__)
    if (bytes >= 2048) {
        size_t head = (size_t)(-(uintptr_t)to & 63);
        memcpy(to, from, head);
        to += head;
        from += head;
        bytes -= head;
        for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)(to + 16), b);
            _mm_stream_si128((__m128i *)(to + 32), c);
            _mm_stream_si128((__m128i *)(to + 48), d);
        }
    }
#endif
    memcpy(to, from, bytes);
}

/* What one thread works with. The caller makes it and gives the same one again. */
struct scratch {
    char *block;           /* STRIPE bytes and then room for a block */
    char *window;          /* page-aligned, for reads around the page cache */
    int64_t window_bytes;
    int64_t held_handle;   /* whose bytes the window holds, -1: nobody's */
    int64_t held_start;
    int64_t held_end;
};

struct request {
    int64_t handle;
    int64_t direct;        /* the same file with O_DIRECT, -1: by the page cache */
    const char *map;       /* the whole file mapped, or NULL */
    int64_t map_bytes;
    int64_t at;            /* of the chunk's data in the file */
    int64_t chunk_bytes;
    int64_t block_bytes;
    const uint8_t *digests;
    char *target;
    int64_t first;         /* first wanted byte of the chunk's data */
    int64_t last;          /* end of the wanted bytes */
    int64_t run_bytes;     /* of each contiguous run */
    int64_t axes;          /* of runs */
    int64_t sizes[MAX_AXES];
    int64_t from_steps[MAX_AXES]; /* bytes in the chunk's data */
    int64_t to_steps[MAX_AXES];   /* bytes at the target */
    int64_t map_low;       /* of the map, touched and not given back yet */
    int64_t map_high;
    /* what came of it */
    int64_t bytes_read;
    int64_t block;         /* that the outcome is about */
    int64_t error;         /* errno of an outcome FAILED */
};

enum { DONE = 0, DIFFERENT = 1, TRUNCATED = 2, FAILED = 3, TOO_SHORT = 4 };

static int read_cached(int handle, char *to, int64_t bytes, int64_t at, struct request *request)
{
    while (bytes > 0) {
        ssize_t done = pread(handle, to, (size_t)bytes, at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0) {
            request->error = errno;
            return FAILED;
        }
        if (done == 0)
            return TRUNCATED;
        to += done;
        at += done;
        bytes -= done;
    }
    return DONE;
}

/* Bytes copied out of the window, which is filled anew when need be; 0: this way does not work here. */
static int64_t from_window(struct request *request, struct scratch *scratch, char *to, int64_t bytes, int64_t at, int64_t end)
{
    if (scratch->held_handle != request->direct || at < scratch->held_start || at >= scratch->held_end) {
        int64_t start = at - at % PAGE, size = (end - start + PAGE - 1) / PAGE * PAGE;
        if (size > scratch->window_bytes)
            size = scratch->window_bytes;
        scratch->held_handle = -1;
        ssize_t done = pread((int)request->direct, scratch->window, (size_t)size, start);
        if (done <= 0 || start + done <= at)
            return 0; /* the way through the page cache says what is wrong */
        scratch->held_handle = request->direct;
        scratch->held_start = start;
        scratch->held_end = start + done;
    }
    int64_t part = scratch->held_end - at < bytes ? scratch->held_end - at : bytes;
    memcpy(to, scratch->window + (at - scratch->held_start), (size_t)part);
    return part;
}

static int fill(struct request *request, struct scratch *scratch, char *to, int64_t bytes, int64_t at)
{
    if (request->direct >= 0) {
        int64_t end = request->at + request->last;
        struct iovec part = {to, (size_t)bytes};
        int64_t held = scratch->held_handle == request->direct && at >= scratch->held_start && at < scratch->held_end;
        int64_t done = held ? 0 : preadv2((int)request->handle, &part, 1, at, RWF_NOWAIT);
        for (done = done < 0 ? 0 : done; done < bytes;) {
            int64_t more = from_window(request, scratch, to + done, bytes - done, at + done, end > at + bytes ? end : at + bytes);
            if (more == 0)
                break;
            done += more;
        }
        to += done;
        at += done;
        bytes -= done;
    }
    return read_cached((int)request->handle, to, bytes, at, request);
}

/* Whether all these bytes are in the page cache, so that touching the map neither waits for storage nor meets its errors. */
static int is_resident(const struct request *request, int64_t at, int64_t bytes)
{
    struct { uint64_t at, bytes; } range = {(uint64_t)(at - at % PAGE), (uint64_t)(bytes + at % PAGE)};
    struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } found;
    if (request->map == NULL || at + bytes > request->map_bytes)
        return 0;
    if (syscall(CACHESTAT, (unsigned)request->handle, &range, &found, 0u) != 0)
        return 0;
    return found.cached >= (range.bytes + PAGE - 1) / PAGE;
}

/* Gives back what of the map was touched, so that it does not count as memory of this process: all of it, or what is much. */
static void give_back(struct request *request, int64_t over)
{
    int64_t low = request->map_low - request->map_low % PAGE;
    if (request->map_high - low > over)
        madvise((void *)(request->map + low), (size_t)(request->map_high - low), MADV_DONTNEED);
    else
        return;
    request->map_low = request->map_high;
}

static int how_to_store(const void *to, int64_t bytes)
{
    return to == NULL ? LEAVE : (uintptr_t)to % STRIPE == 0 && bytes >= STREAM_BYTES ? STREAM : STORE;
}

static void take_mapped(struct request *request, groups_fn *groups, int64_t at, int64_t bytes, char *to, int how, uint8_t *digest)
{
    const uint8_t *from = (const uint8_t *)request->map + at;
    size_t whole = (size_t)(bytes - 1) / GROUP, rest = (size_t)bytes - whole * GROUP;
    uint64_t lanes[8];
    uint8_t last[STRIPE + GROUP];
    start_lanes(lanes);
    groups(lanes, from, whole, (uint8_t *)to, how);
    size_t before = whole ? STRIPE : 0; /* a short end needs bytes before it */
    memcpy(last, from + whole * GROUP - before, before + rest);
    finish(lanes, last + before, rest, (uint64_t)bytes, digest);
    memcpy(to + whole * GROUP, last + before, rest);
    if (at != request->map_high)
        give_back(request, 0), request->map_low = at;
    request->map_high = at + bytes;
    give_back(request, GIVE_BACK_BYTES);
}

static int take_read(struct request *request, struct scratch *scratch, groups_fn *groups, int64_t at, int64_t bytes, char *to, int how,
                     uint8_t *digest)
{
    uint64_t lanes[8], total = (uint64_t)bytes;
    char *room = scratch->block + STRIPE;
    start_lanes(lanes);
    while (bytes > 0) {
        int64_t step = bytes < STEP ? bytes : STEP, whole = step == bytes ? (step - 1) / GROUP : step / GROUP;
        int outcome = fill(request, scratch, room, step, at);
        if (outcome != DONE)
            return outcome;
        groups(lanes, (uint8_t *)room, (size_t)whole, (uint8_t *)to, how);
        if (step == bytes)
            finish(lanes, (uint8_t *)room + whole * GROUP, (size_t)(step - whole * GROUP), total, digest);
        if (to != NULL) {
            memcpy(to + whole * GROUP, room + whole * GROUP, (size_t)(step - whole * GROUP));
            memcpy(scratch->block, room + step - STRIPE, STRIPE); /* a short end needs bytes before it */
            to += step;
        } else {
            room += step;
        }
        at += step;
        bytes -= step;
    }
    return DONE;
}

/* Takes block `number` and its digest; `to`: where all of it goes, or NULL: into the scratch. */
static int take(struct request *request, struct scratch *scratch, groups_fn *groups, int64_t number, char *to)
{
    int64_t start = number * request->block_bytes, left = request->chunk_bytes - start, at = request->at + start;
    uint8_t digest[16];
    if (left > request->block_bytes)
        left = request->block_bytes;
    request->block = number;
    if (left <= 240)
        return TOO_SHORT;
    if (is_resident(request, at, left)) {
        char *target = to == NULL ? scratch->block + STRIPE : to;
        take_mapped(request, groups, at, left, target, to == NULL ? STORE : how_to_store(to, left), digest);
    } else {
        int outcome = take_read(request, scratch, groups, at, left, to, how_to_store(to, left), digest);
        if (outcome != DONE)
            return outcome;
    }
    request->bytes_read += left;
    return memcmp(digest, request->digests + 16 * number, 16) ? DIFFERENT : DONE;
}

static int walk(struct request *request, struct scratch *scratch)
{
    groups_fn *groups = best_groups();
    int64_t index[MAX_AXES] = {0}, from = request->first, held = -1, block = request->block_bytes;
    char *to = request->target;
    for (;;) {
        for (int64_t at = from, end = from + request->run_bytes; at < end;) {
            int64_t number = at / block, start = number * block;
            int64_t stop = start + block < request->chunk_bytes ? start + block : request->chunk_bytes, part = (end < stop ? end : stop) - at;
            if (number != held) {
                int whole = at == start && part == stop - start;
                int outcome = take(request, scratch, groups, number, whole ? to + (at - from) : NULL);
                if (outcome != DONE)
                    return outcome;
                held = whole ? -1 : number;
                if (whole) {
                    at += part;
                    continue;
                }
            }
            put(to + (at - from), scratch->block + STRIPE + (at - start), (size_t)part);
            at += part;
        }
        int64_t axis = request->axes - 1;
        for (; axis >= 0; axis--) {
            from += request->from_steps[axis];
            to += request->to_steps[axis];
            if (++index[axis] < request->sizes[axis])
                break;
            from -= request->sizes[axis] * request->from_steps[axis];
            to -= request->sizes[axis] * request->to_steps[axis];
            index[axis] = 0;
        }
        if (axis < 0)
            return DONE;
    }
}

/* A file that is truncated while its map is read raises SIGBUS in the thread that reads: it is told as truncated, and nobody dies. */
static __thread sigjmp_buf *guard __attribute__((tls_model("initial-exec")));
static struct sigaction before;

static void on_bus(int number, siginfo_t *info, void *context)
{
    if (guard != NULL)
        siglongjmp(*guard, 1);
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else if (before.sa_handler == SIG_DFL)
        sigaction(SIGBUS, &before, NULL); /* not ours: the access is repeated and ends the process, as without us */
    else if (before.sa_handler != SIG_IGN)
        before.sa_handler(number);
}

/* Before the first of all threads reads (1), and after the last (0). */
void regrow_guard(int on)
{
    struct sigaction ours = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK}, now;
    sigemptyset(&ours.sa_mask);
    if (on)
        sigaction(SIGBUS, &ours, &before);
    else if (sigaction(SIGBUS, NULL, &now) == 0 && now.sa_sigaction == on_bus)
        sigaction(SIGBUS, &before, NULL);
}

/* Fills the target with the wanted runs of one chunk; each block that holds any of their bytes is read once and checked. */
int regrow_load(struct request *request, struct scratch *scratch)
{
    request->bytes_read = request->error = request->map_low = request->map_high = 0;
    sigjmp_buf place;
    volatile int outcome = TRUNCATED;
    if (sigsetjmp(place, 0) == 0) {
        guard = &place;
        outcome = walk(request, scratch);
    }
    guard = NULL;
    give_back(request, 0);
#if defined(__SSE2__)
    _mm_sfence();
#endif
    return outcome;
}
