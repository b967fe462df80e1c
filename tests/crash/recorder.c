/* Preloaded into a program (LD_PRELOAD): records what it changes below a folder, and can make a change fail.
 * It begins with the program, if the variables are set then, or with crash_begin().
 *
 * SMS_CRASH_ROOT  the folder, without symbolic links
 * SMS_CRASH_LOG   the file of records: a line "KIND INODE OFFSET LENGTH BYTES PATH", and after it so many BYTES
 * SMS_CRASH_STATE a file of five numbers (struct control), shared with who runs the program
 *
 * What fails: writes, new files, folders and links, renames, truncations, flushes.
 * The kinds are those of replay.py. Changes through stdio of the C library, mmap(2), io_uring or the kernel (such as
 * copy_file_range(2), which is refused here) are not seen: replay.py compares the result with the folder.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    long count;     /* changes so far that need space */
    long fail_at;   /* number of the change that fails; 0: none */
    long for_good;  /* those after it fail, too, if they need new space: writes, new files and folders */
    long partly;    /* 1: a write that fails writes half of its bytes, and the next write fails (2: it is due) */
    long reason;    /* the error number of a change that fails */
};

static char root[PATH_MAX];
static size_t root_length;
static int records = -1;
static struct control *control;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

__attribute__((constructor)) void crash_begin(void)
{
    const char *folder = getenv("SMS_CRASH_ROOT"), *log = getenv("SMS_CRASH_LOG"), *state = getenv("SMS_CRASH_STATE");
    if (!folder || !log || !state)
        return;
    int shared = syscall(SYS_openat, AT_FDCWD, state, O_RDWR | O_CLOEXEC, 0);
    int opened = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CLOEXEC, 0);
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    if (shared < 0 || opened < 0 || control == MAP_FAILED)
        abort();
    close(shared);
    /* Shells and daemons use low descriptors as they like. */
    records = fcntl(opened, F_DUPFD_CLOEXEC, 700);
    close(opened);
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
}

static int inside(const char *path)
{
    return records >= 0 && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int path_of(int fd, char *path)
{
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0 && inside(path);
}

/* The path of a name in a folder, without symbolic links in the folder's path. */
static int absolute(int folder, const char *name, char *path)
{
    char whole[2 * PATH_MAX], above[PATH_MAX];
    if (records < 0 || !name)
        return 0;
    if (name[0] == '/')
        snprintf(whole, sizeof whole, "%s", name);
    else {
        if (folder == AT_FDCWD) {
            if (!getcwd(above, sizeof above))
                return 0;
        } else
            path_of(folder, above);
        snprintf(whole, sizeof whole, "%s/%s", above, name);
    }
    size_t length = strlen(whole);
    while (length > 1 && whole[length - 1] == '/')
        whole[--length] = 0;
    char *last = strrchr(whole, '/');
    if (!last || last == whole)
        return 0;
    *last = 0;
    if (!realpath(whole, above) || snprintf(path, PATH_MAX, "%s/%s", above, last + 1) >= PATH_MAX)
        return 0;
    return inside(path);
}

static void add(char kind, unsigned long inode, long offset, size_t length, const void *bytes, const char *path,
                const char *other)
{
    char head[2 * PATH_MAX + 100];
    int size = snprintf(head, sizeof head, "%c %lu %ld %zu %zu %s\t%s\n", kind, inode, offset, length,
                        bytes ? length : 0, path, other ? other : "");
    struct iovec parts[2] = {{head, size}, {(void *)bytes, bytes ? length : 0}};
    int before = errno;
    if (syscall(SYS_writev, records, parts, 2) < 0)
        abort();
    errno = before;
}

/* Whether this change is to fail; it is counted. ``grows``: it needs new space, as on a full disk. */
static int fails(int grows)
{
    long number = __sync_add_and_fetch(&control->count, 1);
    if (!control->fail_at || number < control->fail_at)
        return 0;
    if (number > control->fail_at && !(control->for_good && grows))
        return 0;
    errno = control->reason;
    return 1;
}

void crash_mark(const char *text)
{
    if (records >= 0)
        add('A', 0, 0, 0, NULL, text, NULL);
}

static int open_it(int folder, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    struct stat before, now;
    int changes = flags & (O_CREAT | O_TRUNC), existed = 0;
    if (!changes || (flags & O_TMPFILE) == O_TMPFILE || !absolute(folder, name, path))
        return syscall(SYS_openat, folder, name, flags, mode);
    pthread_mutex_lock(&lock);
    existed = !fstatat(folder, name, &before, 0);
    int fd = !existed && (flags & O_CREAT) && fails(1) ? -1 : syscall(SYS_openat, folder, name, flags, mode);
    if (fd >= 0 && !fstat(fd, &now) && S_ISREG(now.st_mode)) {
        path_of(fd, path);
        if (!existed)
            add('C', now.st_ino, 0, 0, NULL, path, NULL);
        else if ((flags & O_TRUNC) && before.st_size)
            add('T', now.st_ino, 0, 0, NULL, path, NULL);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE(flags, last)                                                                                              \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                             \
        va_list rest;                                                                                                  \
        va_start(rest, last);                                                                                          \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

int open(const char *name, int flags, ...)
{
    MODE(flags, flags)
    return open_it(AT_FDCWD, name, flags, mode);
}
int open64(const char *name, int flags, ...)
{
    MODE(flags, flags)
    return open_it(AT_FDCWD, name, flags, mode);
}
int openat(int folder, const char *name, int flags, ...)
{
    MODE(flags, flags)
    return open_it(folder, name, flags, mode);
}
int openat64(int folder, const char *name, int flags, ...)
{
    MODE(flags, flags)
    return open_it(folder, name, flags, mode);
}
int __open_2(const char *name, int flags) { return open_it(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return open_it(AT_FDCWD, name, flags, 0); }
int creat(const char *name, mode_t mode) { return open_it(AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }

static ssize_t write_it(int fd, const void *data, size_t size, off_t at)
{
    char path[PATH_MAX];
    struct stat state;
    if (records < 0 || !size || fstat(fd, &state) || !S_ISREG(state.st_mode) || !path_of(fd, path))
        return at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at);
    pthread_mutex_lock(&lock);
    ssize_t done = -1;
    int failed = fails(1);
    if (control->partly == 2) {
        control->partly = 1;
        failed = 1;
    } else if (failed && control->partly && size > 1) {
        control->partly = 2;
        failed = 0;
        size /= 2;
    }
    if (failed)
        errno = control->reason;
    else
        done = at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at);
    if (done > 0)
        add('W', state.st_ino, at < 0 ? lseek(fd, 0, SEEK_CUR) - done : at, done, data, path, NULL);
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t write(int fd, const void *data, size_t size) { return write_it(fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return write_it(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return write_it(fd, data, size, at); }

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    for (int at = 0; at < count; at++)
        if (parts[at].iov_len)
            return write(fd, parts[at].iov_base, parts[at].iov_len); /* a short write: the caller goes on */
    return 0;
}

/* As qemu-img writes; it goes on after a short write, too. */
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    for (int at = 0; at < count; at++)
        if (parts[at].iov_len)
            return pwrite(fd, parts[at].iov_base, parts[at].iov_len, offset);
    return 0;
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) { return pwritev(fd, parts, count, offset); }

ssize_t sendfile64(int out, int in, off_t *offset, size_t count)
{
    static char block[1 << 16];
    char path[PATH_MAX];
    if (!path_of(out, path))
        return syscall(SYS_sendfile, out, in, offset, count);
    pthread_mutex_lock(&lock);
    count = count < sizeof block ? count : sizeof block;
    ssize_t got = offset ? pread(in, block, count, *offset) : read(in, block, count);
    ssize_t done = got > 0 ? write(out, block, got) : got;
    if (offset && done > 0)
        *offset += done;
    pthread_mutex_unlock(&lock);
    return done;
}
ssize_t sendfile(int out, int in, off_t *offset, size_t count) { return sendfile64(out, in, offset, count); }

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags)
{
    char path[PATH_MAX];
    if (!path_of(out, path))
        return syscall(SYS_copy_file_range, in, from, out, to, size, flags);
    errno = ENOSYS;
    return -1;
}

static int truncate_it(int fd, off_t size)
{
    char path[PATH_MAX];
    struct stat state;
    int ours = records >= 0 && !fstat(fd, &state) && path_of(fd, path);
    pthread_mutex_lock(&lock);
    int failed = ours && fails(0) ? -1 : (int)syscall(SYS_ftruncate, fd, size);
    if (!failed && ours && state.st_size != size)
        add('T', state.st_ino, size, 0, NULL, path, NULL);
    pthread_mutex_unlock(&lock);
    return failed;
}
int ftruncate(int fd, off_t size) { return truncate_it(fd, size); }
int ftruncate64(int fd, off_t size) { return truncate_it(fd, size); }
int truncate(const char *name, off_t size)
{
    int fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CLOEXEC, 0);
    int failed = fd < 0 ? -1 : truncate_it(fd, size);
    if (fd >= 0)
        close(fd);
    return failed;
}
int truncate64(const char *name, off_t size) { return truncate(name, size); }

static int sync_it(int fd, long call)
{
    char path[PATH_MAX];
    struct stat state;
    int ours = records >= 0 && !fstat(fd, &state) && path_of(fd, path);
    pthread_mutex_lock(&lock);
    int failed = ours && fails(0) ? -1 : ours ? 0 : syscall(call, fd);
    if (!failed && ours)
        add(call == SYS_syncfs ? 'S' : S_ISDIR(state.st_mode) ? 'D' : 'F', state.st_ino, 0, 0, NULL, path, NULL);
    pthread_mutex_unlock(&lock);
    return failed;
}
int fsync(int fd) { return sync_it(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_it(fd, SYS_fdatasync); }
int syncfs(int fd) { return sync_it(fd, SYS_syncfs); }
void sync(void)
{
    if (records >= 0)
        add('S', 0, 0, 0, NULL, root, NULL);
}

/* A change of one name or two: counted unless it frees space, done, recorded. */
#define NAMES(kind, counted, grows, first_folder, first, two, second_folder, second, call)                                    \
    char path[PATH_MAX], other[PATH_MAX] = "";                                                                         \
    int ours = absolute(first_folder, first, path);                                                                    \
    if (two)                                                                                                           \
        ours = absolute(second_folder, second, other) || ours;                                                         \
    if (!ours)                                                                                                         \
        return call;                                                                                                   \
    pthread_mutex_lock(&lock);                                                                                         \
    struct stat named = {0};                                                                                           \
    fstatat(first_folder, first, &named, AT_SYMLINK_NOFOLLOW);                                                         \
    int failed = (counted) && fails(grows) ? -1 : (int)(call);                                                          \
    if (!failed)                                                                                                       \
        add(kind, named.st_ino, 0, 0, NULL, path, other);                                                              \
    pthread_mutex_unlock(&lock);                                                                                       \
    return failed;

static int rename_it(int from, const char *old, int to, const char *new, unsigned flags)
{
    NAMES('R', 1, 0, from, old, 1, to, new, syscall(SYS_renameat2, from, old, to, new, flags))
}
int rename(const char *old, const char *new) { return rename_it(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return rename_it(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    return rename_it(from, old, to, new, flags);
}

int unlinkat(int folder, const char *name, int flags)
{
    NAMES(flags & AT_REMOVEDIR ? 'X' : 'U', 0, 0, folder, name, 0, 0, "", syscall(SYS_unlinkat, folder, name, flags))
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode)
{
    NAMES('M', 1, 1, folder, name, 0, 0, "", syscall(SYS_mkdirat, folder, name, mode))
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int linkat(int from, const char *old, int to, const char *new, int flags)
{
    NAMES('L', 1, 0, from, old, 1, to, new, syscall(SYS_linkat, from, old, to, new, flags))
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int symlinkat(const char *target, int folder, const char *name)
{
    char path[PATH_MAX];
    if (!absolute(folder, name, path))
        return syscall(SYS_symlinkat, target, folder, name);
    pthread_mutex_lock(&lock);
    int failed = fails(1) ? -1 : (int)syscall(SYS_symlinkat, target, folder, name);
    if (!failed)
        add('Y', 0, 0, 0, NULL, path, target);
    pthread_mutex_unlock(&lock);
    return failed;
}
int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }
