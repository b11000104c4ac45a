/*
 * Resets connections: preloaded into an HDFS helper (../../e2e/src/scenario/resets.rs). Of RESETS_ONE_IN receives from the
 * network one fails, and its connection is over; RESETS_FILE gets a byte for each.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static int file = -1;
static unsigned long one_in;
static _Atomic unsigned long state;

__attribute__((constructor)) static void begin(void) {
  const char *number = getenv("RESETS_ONE_IN"), *path = getenv("RESETS_FILE"), *seed = getenv("RESETS_SEED");
  one_in = number ? strtoul(number, NULL, 10) : 0;
  state = ((seed ? strtoul(seed, NULL, 10) : 0) + (unsigned long)getpid()) * 2654435761u + 1;
  if (path) file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
}

static unsigned long next(void) {
  unsigned long now = atomic_fetch_add(&state, 0x9e3779b97f4a7c15ul);
  now = (now ^ (now >> 30)) * 0xbf58476d1ce4e5b9ul;
  now = (now ^ (now >> 27)) * 0x94d049bb133111ebul;
  return now ^ (now >> 31);
}

ssize_t recv(int socket, void *buffer, size_t length, int flags) {
  int domain = AF_UNIX;
  socklen_t size = sizeof domain;
  if (one_in && next() % one_in == 0 && getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
      domain != AF_UNIX) {
    if (file >= 0 && write(file, "r", 1) < 0) one_in = 0;
    shutdown(socket, SHUT_RDWR);
    errno = ECONNRESET;
    return -1;
  }
  return syscall(SYS_recvfrom, socket, buffer, length, flags, NULL, NULL);
}
