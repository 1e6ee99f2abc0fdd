// Loaded before libc: ends the process with SIGKILL at one of the calls by which one thread touches
// files, counted from kill_at(n) on; in a write, when half of it is done. kill_at(0) only counts.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long last;
static long calls;
static pid_t watched;

void kill_at(long n) {
  calls = 0;
  last = n;
  watched = gettid();
}

long calls_so_far(void) { return calls; }

static int due(void) { return watched == gettid() && ++calls == last; }

static void end(void) { kill(getpid(), SIGKILL); }

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

#define MOMENT(type, name, parameters, arguments)      \
  type name parameters {                               \
    if (due()) end();                                  \
    return ((type(*) parameters)next(#name))arguments; \
  }

#define OPENS(name, parameters, arguments)                              \
  int name parameters {                                                 \
    va_list rest;                                                       \
    va_start(rest, flags);                                              \
    int mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, int) : 0; \
    va_end(rest);                                                       \
    if (due()) end();                                                   \
    return ((int (*)(const char *, int, int))next(#name))arguments;     \
  }

OPENS(open, (const char *path, int flags, ...), (path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode))

MOMENT(FILE *, fopen, (const char *path, const char *mode), (path, mode))
MOMENT(FILE *, fopen64, (const char *path, const char *mode), (path, mode))
MOMENT(int, fflush, (FILE * file), (file))
MOMENT(int, fclose, (FILE * file), (file))
MOMENT(int, fsync, (int file), (file))
MOMENT(int, close, (int file), (file))
MOMENT(int, mkdir, (const char *path, mode_t mode), (path, mode))
MOMENT(int, rmdir, (const char *path), (path))
MOMENT(int, unlink, (const char *path), (path))
MOMENT(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
MOMENT(int, remove, (const char *path), (path))
MOMENT(int, rename, (const char *from, const char *to), (from, to))
MOMENT(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to))

ssize_t write(int file, const void *data, size_t size) {
  ssize_t (*original)(int, const void *, size_t) = next("write");
  if (due()) end();
  if (due()) {
    original(file, data, size / 2);
    end();
  }
  return original(file, data, size);
}
