/* Copies many pieces of memory past the caches: a snapshot is not read again by the processor that makes it, and ordinary stores
   would first read each line of the target. Targets are 64-byte aligned, sources need not be. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LINE 64
#define PAGE 4096
#define SHORT 4096 /* the caches are no trouble below it */

struct part {
    char *to;
    const char *from;
    size_t bytes;
};

/* Whole lines, `to` at a multiple of LINE; returns the bytes copied. */
typedef size_t lines_fn(char *to, const char *from, size_t bytes);

#if defined(__x86_64__)
static size_t lines_sse2(char *to, const char *from, size_t bytes)
{
    size_t at = 0;
    for (; at + LINE <= bytes; at += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + at));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + at + 48));
        _mm_stream_si128((__m128i *)(to + at), a);
        _mm_stream_si128((__m128i *)(to + at + 16), b);
        _mm_stream_si128((__m128i *)(to + at + 32), c);
        _mm_stream_si128((__m128i *)(to + at + 48), d);
    }
    return at;
}

/* Whole lines in one store each (a line that is stored in parts may leave the processor in parts), of four pages in turn: as many rows
   of memory are under way, and the next pages are fetched before their turn. */
__attribute__((target("avx512f"))) static size_t lines_avx512(char *to, const char *from, size_t bytes)
{
    size_t at = 0;
    for (; at + 4 * PAGE <= bytes; at += 4 * PAGE)
        for (size_t line = at; line < at + PAGE; line += LINE) {
            for (size_t page = 0; page < 4 * PAGE; page += PAGE)
                _mm_prefetch(from + line + page + 4 * PAGE, _MM_HINT_T0);
            for (size_t page = 0; page < 4 * PAGE; page += PAGE)
                _mm512_stream_si512((void *)(to + line + page), _mm512_loadu_si512(from + line + page));
        }
    for (; at + LINE <= bytes; at += LINE)
        _mm512_stream_si512((void *)(to + at), _mm512_loadu_si512(from + at));
    return at;
}
#endif

static lines_fn *best_lines(int plain)
{
#if defined(__x86_64__)
    return !plain && __builtin_cpu_supports("avx512f") ? lines_avx512 : lines_sse2;
#else
    (void)plain;
    return NULL;
#endif
}

static void stream(lines_fn *lines, char *to, const char *from, size_t bytes)
{
    if (lines != NULL && bytes >= SHORT) {
        size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
        memcpy(to, from, head);
        head += lines(to + head, from + head, bytes - head);
        to += head;
        from += head;
        bytes -= head;
    }
    memcpy(to, from, bytes);
}

/* `plain`: with what every processor of this kind has. */
void regrow_stream_copy(const struct part *parts, size_t count, int plain)
{
    lines_fn *lines = best_lines(plain);
    for (size_t index = 0; index < count; index++)
        stream(lines, parts[index].to, parts[index].from, parts[index].bytes);
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
