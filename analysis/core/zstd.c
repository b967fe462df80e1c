/* zstd (RFC 8878), decompressed by the system's libzstd if available: a pipe from the program `zstd` would copy every
 * byte twice more. The library is loaded at run time; it is not needed for compiling.
 */
#include "core.h"

#include <dlfcn.h>
#include <stdlib.h>

#define INPUT (256u << 10)

/* ZSTD_inBuffer and ZSTD_outBuffer of zstd.h; the streaming functions are part of its stable interface. */
typedef struct {
	const void *data;
	size_t size, at;
} In;
typedef struct {
	void *data;
	size_t size, at;
} Out;

struct Zstd {
	void *library, *stream;
	void *(*create)(void);
	size_t (*release)(void *);
	size_t (*decompress)(void *, Out *, In *);
	unsigned (*is_error)(size_t);
	In in;
	size_t left; /* 0: at the end of a frame */
	bool ended;
	uint8_t input[INPUT];
};

/* dlsym returns no function pointers in ISO C; POSIX guarantees that this works. */
static bool find(void *library, const char *name, void *to)
{
	void **place = to;
	*place = dlsym(library, name);
	return *place != NULL;
}

Zstd *zstd_begin(void)
{
	Zstd *z = calloc(1, sizeof *z);
	if (!z)
		return NULL;
	z->library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
	if (z->library && find(z->library, "ZSTD_createDStream", &z->create) &&
	    find(z->library, "ZSTD_freeDStream", &z->release) &&
	    find(z->library, "ZSTD_decompressStream", &z->decompress) && find(z->library, "ZSTD_isError", &z->is_error))
		z->stream = z->create();
	if (z->stream)
		return z;
	zstd_end(z);
	return NULL;
}

void zstd_end(Zstd *z)
{
	if (!z)
		return;
	if (z->stream)
		z->release(z->stream);
	if (z->library)
		dlclose(z->library);
	free(z);
}

ssize_t zstd_read(Zstd *z, Source *s, uint8_t *to, size_t room)
{
	Out out = {to, room, 0};
	while (out.at < room && !s->damage) {
		if (z->in.at == z->in.size && !z->ended) {
			ssize_t got = source_pull(s, z->input, INPUT);
			if (got < 0)
				return got;
			z->ended = got == 0;
			z->in = (In){z->input, (size_t)got, 0};
		}
		bool dry = z->ended && z->in.at == z->in.size;
		if (dry && (!z->left || atomic_load(s->stopped)))
			break;
		size_t before = out.at, left = z->decompress(z->stream, &out, &z->in);
		if (z->is_error(left)) {
			s->damage = "zstd data is damaged";
			continue;
		}
		z->left = left;
		if (dry && out.at == before)
			s->damage = "zstd data ends early";
	}
	return (ssize_t)out.at;
}
