// Compares nccl_types.h with NCCL's own headers (2.31.2; later ones only append). Makes no code, and compares nothing
// where the toolkit's NCCL is older: which one runs is found out in the process.
#include <nccl.h>

#if NCCL_VERSION_CODE >= 23102
#include <nccl_device.h>

#include <cstddef>
#include <type_traits>
#include <utility>

#include "nccl_types.h"

namespace tide::nccl {

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs))
#define SAME_FIELD(ours, field, theirs, name)                               \
  static_assert(offsetof(ours, field) == offsetof(theirs, name) &&          \
                sizeof(std::declval<ours&>().field) == sizeof(std::declval<theirs&>().name))
#define SAME_VALUE(ours, theirs) static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs))

SAME_SIZE(Result, ncclResult_t);
SAME_SIZE(CommHandle, ncclComm_t);
SAME_SIZE(WindowHandle, ncclWindow_t);
SAME_SIZE(UniqueId, ncclUniqueId);
SAME_VALUE(kSuccess, ncclSuccess);
SAME_VALUE(kInProgress, ncclInProgress);
SAME_VALUE(kInt8, ncclInt8);
SAME_VALUE(kCollSymmetric, NCCL_WIN_COLL_SYMMETRIC);
SAME_VALUE(kMagic, static_cast<unsigned>(NCCL_API_MAGIC));
SAME_VALUE(kUndefined, NCCL_CONFIG_UNDEF_INT);
static_assert(NCCL_VERSION_CODE >= kVersion);

// A newer header may have more at the end.
static_assert(sizeof(Config) <= sizeof(ncclConfig_t) && sizeof(Properties) <= sizeof(ncclCommProperties_t));
#if NCCL_VERSION_CODE == 23102
SAME_SIZE(Config, ncclConfig_t);
SAME_SIZE(Properties, ncclCommProperties_t);
#endif
SAME_FIELD(Config, size, ncclConfig_t, size);
SAME_FIELD(Config, magic, ncclConfig_t, magic);
SAME_FIELD(Config, version, ncclConfig_t, version);
SAME_FIELD(Config, blocking, ncclConfig_t, blocking);
SAME_FIELD(Config, min_ctas, ncclConfig_t, minCTAs);
SAME_FIELD(Config, max_ctas, ncclConfig_t, maxCTAs);
SAME_FIELD(Config, split_share, ncclConfig_t, splitShare);
SAME_FIELD(Config, comm_name, ncclConfig_t, commName);
SAME_FIELD(Config, nvls_ctas, ncclConfig_t, nvlsCTAs);
SAME_FIELD(Config, graph_usage_mode, ncclConfig_t, graphUsageMode);
SAME_FIELD(Config, num_rma_ctx, ncclConfig_t, numRmaCtx);
SAME_FIELD(Config, num_rma_sig, ncclConfig_t, numRmaSig);
SAME_FIELD(Config, rma_eager_init, ncclConfig_t, rmaEagerInit);
SAME_FIELD(Config, host_cft_mode, ncclConfig_t, hostCftMode);

SAME_SIZE(WaitSignal, ncclWaitSignalDesc_t);
SAME_FIELD(WaitSignal, count, ncclWaitSignalDesc_t, opCnt);
SAME_FIELD(WaitSignal, peer, ncclWaitSignalDesc_t, peer);
SAME_FIELD(WaitSignal, signal, ncclWaitSignalDesc_t, sigIdx);
SAME_FIELD(WaitSignal, context, ncclWaitSignalDesc_t, ctx);

SAME_FIELD(Properties, rank, ncclCommProperties_t, rank);
SAME_FIELD(Properties, ranks, ncclCommProperties_t, nRanks);
SAME_FIELD(Properties, multimem, ncclCommProperties_t, multimemSupport);
SAME_FIELD(Properties, gin_type, ncclCommProperties_t, ginType);
SAME_FIELD(Properties, lsa_teams, ncclCommProperties_t, nLsaTeams);
SAME_FIELD(Properties, host_rma, ncclCommProperties_t, hostRmaSupport);
SAME_FIELD(Properties, gin_support, ncclCommProperties_t, ginSupport);
SAME_FIELD(Properties, dev_comm_runtime_version_size, ncclCommProperties_t, devCommRuntimeVersionSize);

// Each entry point: as many parameters as in the header, of the same sizes (ours are spelled without its types).
template <class Ours, class Theirs>
struct SameShape : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameShape<R (*)(A...), S(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B)) return false;
    else return sizeof(R) == sizeof(S) && ((sizeof(A) == sizeof(B)) && ...);
  }();
};
#define SAME_SHAPE(member, result, parameters) \
  static_assert(SameShape<decltype(Api::member), decltype(::nccl##member)>::value);
TIDE_NCCL_ENTRY_POINTS(SAME_SHAPE)

}  // namespace tide::nccl

#endif
