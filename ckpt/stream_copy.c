/* Copies many pieces of memory past the caches: a snapshot is not read again by the processor that makes it, and ordinary stores
   would first read each line of the target. Targets are 64-byte aligned, sources need not be. */
#include <stddef.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

struct part {
    char *to;
    const char *from;
    size_t bytes;
};

static void stream(char *to, const char *from, size_t bytes)
{
#if defined(__SSE2__)
    size_t head = (size_t)(-(unsigned long long)to & 63);
    if (bytes < 4096) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
#endif
    memcpy(to, from, bytes);
}

void regrow_stream_copy(const struct part *parts, size_t count)
{
    for (size_t index = 0; index < count; index++)
        stream(parts[index].to, parts[index].from, parts[index].bytes);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}
