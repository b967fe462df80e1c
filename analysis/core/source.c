/* Input: reads a descriptor, large files ahead in a thread.
 *
 * Half of the time for a large capture is copying in the kernel, and decompression takes longer than counting. The
 * thread writes into a ring buffer that is mapped twice in a row, so that its contents are always contiguous.
 */
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef SMALL_TABLES
#define BLOCK (8u << 10)
#define RING (64u << 10)
#else
#define BLOCK (512u << 10)
#define RING (4u << 20)
#endif
#define LARGE (16 << 20) /* a file of this size is worth a thread */

ssize_t source_pull(Source *s, uint8_t *to, size_t room)
{
	if (s->prefix_left) {
		size_t got = room < s->prefix_left ? room : s->prefix_left;
		memcpy(to, s->prefix, got);
		s->prefix += got;
		s->prefix_left -= got;
		return (ssize_t)got;
	}
	/* Poll with a timeout: an idle pipe must not delay stop() of another thread. */
	while (s->descriptor >= 0 && !atomic_load(s->stopped)) {
		struct pollfd one = {.fd = s->descriptor, .events = POLLIN};
		int ready = poll(&one, 1, 200);
		if (ready == 0 || (ready < 0 && errno == EINTR))
			continue;
		ssize_t got = read(s->descriptor, to, room);
		if (got >= 0 || (errno != EINTR && errno != EAGAIN))
			return got;
	}
	return 0;
}

static ssize_t pull(Source *s, uint8_t *to, size_t room)
{
	return s->zstd ? zstd_read(s->zstd, s, to, room) : source_pull(s, to, room);
}

/* ---- read-ahead -------------------------------------------------------------------------------- */

struct Ahead {
	Source *source;
	uint8_t *ring;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t more, room;
	uint64_t written, taken; /* bytes of the file */
	bool ended, quit;
	int error;
};

static void *run_ahead(void *argument)
{
	Ahead *a = argument;
	for (bool going = true; going;) {
		pthread_mutex_lock(&a->lock);
		while (a->written - a->taken > RING - BLOCK && !a->quit)
			pthread_cond_wait(&a->room, &a->lock);
		going = !a->quit;
		uint64_t at = a->written;
		pthread_mutex_unlock(&a->lock);
		ssize_t got = going ? pull(a->source, a->ring + at % RING, BLOCK) : 0;
		int error = errno;
		pthread_mutex_lock(&a->lock);
		if (got > 0) {
			a->written += (uint64_t)got;
		} else {
			a->error = got < 0 ? error : 0;
			a->ended = true;
			going = false;
		}
		pthread_cond_signal(&a->more);
		pthread_mutex_unlock(&a->lock);
	}
	return NULL;
}

static uint8_t *make_ring(void)
{
	int descriptor = memfd_create("sms-ring", MFD_CLOEXEC);
	if (descriptor < 0)
		return NULL;
	uint8_t *ring = MAP_FAILED;
	if (!ftruncate(descriptor, RING))
		ring = mmap(NULL, 2 * (size_t)RING, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (size_t half = 0; ring != MAP_FAILED && half < 2; half++)
		if (mmap(ring + half * RING, RING, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED) {
			munmap(ring, 2 * (size_t)RING);
			ring = MAP_FAILED;
		}
	close(descriptor);
	return ring == MAP_FAILED ? NULL : ring;
}

static void begin_ahead(Source *s)
{
	struct stat status;
	if (s->descriptor < 0 || fstat(s->descriptor, &status))
		return;
	if (!s->zstd && (s->prefix_left || !S_ISREG(status.st_mode) || status.st_size < LARGE))
		return;
	Ahead *a = calloc(1, sizeof *a);
	uint8_t *ring = a ? make_ring() : NULL;
	if (!ring) {
		free(a);
		return;
	}
	a->ring = ring;
	a->source = s;
	pthread_mutex_init(&a->lock, NULL);
	pthread_cond_init(&a->more, NULL);
	pthread_cond_init(&a->room, NULL);
	/* Signals are handled in the main thread. */
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	bool fine = !pthread_create(&a->thread, NULL, run_ahead, a);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!fine) {
		munmap(ring, 2 * (size_t)RING);
		free(a);
		return;
	}
	free(s->data);
	s->data = ring;
	s->ahead = a;
}

static void fill_from_ahead(Source *s, size_t wanted)
{
	Ahead *a = s->ahead;
	if (s->start >= RING) {
		s->start -= RING;
		s->end -= RING;
		s->base += RING;
	}
	uint64_t taken = s->base + s->start;
	pthread_mutex_lock(&a->lock);
	a->taken = taken;
	pthread_cond_signal(&a->room);
	while (a->written - taken < wanted && !a->ended)
		pthread_cond_wait(&a->more, &a->lock);
	*s->read_bytes += a->written - (s->base + s->end);
	s->end = (size_t)(a->written - s->base);
	if (a->ended && a->written - taken < wanted) {
		s->ended = true;
		s->error = a->error;
	}
	pthread_mutex_unlock(&a->lock);
}

/* ---- interface for reader.c ---------------------------------------------------------------------- */

bool source_begin(Source *s)
{
	s->data = malloc(WINDOW);
	if (s->data)
		begin_ahead(s);
	else
		zstd_end(s->zstd);
	return s->data != NULL;
}

void source_end(Source *s)
{
	Ahead *a = s->ahead;
	if (!a) {
		free(s->data);
		zstd_end(s->zstd);
		return;
	}
	pthread_mutex_lock(&a->lock);
	a->quit = true;
	pthread_cond_signal(&a->room);
	pthread_mutex_unlock(&a->lock);
	pthread_join(a->thread, NULL);
	zstd_end(s->zstd);
	munmap(a->ring, 2 * (size_t)RING);
	free(a);
}

void source_fill(Source *s, const Sink *sink, size_t wanted)
{
	sink->moving(sink->owner);
	if (s->ahead) {
		fill_from_ahead(s, wanted);
		return;
	}
	size_t left = s->end - s->start;
	/* Move no more than was consumed since the last move, or a pipe with small writes would move it again and again. */
	if (s->start > 0 && (left <= s->start || WINDOW - s->start < wanted)) {
		memmove(s->data, s->data + s->start, left);
		s->base += s->start;
		s->end = left;
		s->start = 0;
	}
	while (s->end - s->start < wanted && !s->ended) {
		size_t room = WINDOW - s->end < BLOCK ? WINDOW - s->end : BLOCK;
		ssize_t got = pull(s, s->data + s->end, room);
		if (got < 0)
			s->error = errno;
		if (got <= 0) {
			s->ended = true;
			return;
		}
		s->end += (size_t)got;
		*s->read_bytes += (uint64_t)got;
	}
}
