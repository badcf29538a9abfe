// Functions that a process calls before all others.
#include <cerrno>

#include "api.h"

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

const char* outrider_path(void) {
#if defined(__AMX_TILE__)
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512F__)
  return "avx512";
#else
  return "portable";
#endif
}

int32_t outrider_prepare_process(void) {
#if defined(__AMX_TILE__)
#if defined(__linux__)
  // Linux saves tile registers only for processes that requested it; without the request the
  // first tile instruction is a SIGILL. It applies to all threads, also to those already running.
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
#else
  return 0;
#endif
}
