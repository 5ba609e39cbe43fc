// Compiled only where cuda.h is found: our declarations against NVIDIA's.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "driver.h"

namespace tide::cuda {

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs))
#define SAME_FIELD(ours, field, theirs, name)                                   \
  static_assert(offsetof(ours, field) == offsetof(theirs, name) &&              \
                sizeof(std::declval<ours&>().field) == sizeof(std::declval<theirs&>().name))
#define SAME_VALUE(ours, theirs) static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs))

SAME_SIZE(Result, CUresult);
SAME_SIZE(DeviceId, CUdevice);
SAME_SIZE(DevicePtr, CUdeviceptr);
SAME_SIZE(MemHandle, CUmemGenericAllocationHandle);
SAME_SIZE(StreamHandle, CUstream);
SAME_SIZE(Uuid, CUuuid);

SAME_VALUE(kSuccess, CUDA_SUCCESS);
SAME_VALUE(kErrorOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(kErrorNoDevice, CUDA_ERROR_NO_DEVICE);
SAME_VALUE(kErrorNotReady, CUDA_ERROR_NOT_READY);

SAME_VALUE(kAsyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
SAME_VALUE(kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_VALUE(kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME_VALUE(kStreamMemOpsV1, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1);
SAME_VALUE(kVirtualMemoryManagement, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME_VALUE(kPosixFdHandles, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME_VALUE(kRdmaWithVmm, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME_VALUE(k64BitStreamMemOps, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
SAME_VALUE(kMulticastSupported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
SAME_VALUE(kMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

SAME_VALUE(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME_VALUE(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(kHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE);
SAME_VALUE(kHostAllocDeviceMap, CU_MEMHOSTALLOC_DEVICEMAP);
SAME_VALUE(kLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE);
SAME_VALUE(kAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME_VALUE(kHandlePosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME_VALUE(kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME_VALUE(kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME_VALUE(kMemoryTypeDevice, CU_MEMORYTYPE_DEVICE);
SAME_VALUE(kWaitValue32, CU_STREAM_MEM_OP_WAIT_VALUE_32);
SAME_VALUE(kWriteValue32, CU_STREAM_MEM_OP_WRITE_VALUE_32);
SAME_VALUE(kWaitGeq, CU_STREAM_WAIT_VALUE_GEQ);
SAME_VALUE(kWriteDefault, CU_STREAM_WRITE_VALUE_DEFAULT);

SAME_SIZE(MemLocation, CUmemLocation);
SAME_FIELD(MemLocation, type, CUmemLocation, type);
SAME_FIELD(MemLocation, id, CUmemLocation, id);

SAME_SIZE(MemAllocationProp, CUmemAllocationProp);
SAME_FIELD(MemAllocationProp, type, CUmemAllocationProp, type);
SAME_FIELD(MemAllocationProp, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_FIELD(MemAllocationProp, location, CUmemAllocationProp, location);
SAME_FIELD(MemAllocationProp, win32, CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD(MemAllocationProp, flags, CUmemAllocationProp, allocFlags);

SAME_SIZE(MemAccessDesc, CUmemAccessDesc);
SAME_FIELD(MemAccessDesc, location, CUmemAccessDesc, location);
SAME_FIELD(MemAccessDesc, flags, CUmemAccessDesc, flags);

SAME_SIZE(Memcpy2D, CUDA_MEMCPY2D);
SAME_FIELD(Memcpy2D, src_x, CUDA_MEMCPY2D, srcXInBytes);
SAME_FIELD(Memcpy2D, src_type, CUDA_MEMCPY2D, srcMemoryType);
SAME_FIELD(Memcpy2D, src_device, CUDA_MEMCPY2D, srcDevice);
SAME_FIELD(Memcpy2D, src_pitch, CUDA_MEMCPY2D, srcPitch);
SAME_FIELD(Memcpy2D, dst_x, CUDA_MEMCPY2D, dstXInBytes);
SAME_FIELD(Memcpy2D, dst_type, CUDA_MEMCPY2D, dstMemoryType);
SAME_FIELD(Memcpy2D, dst_device, CUDA_MEMCPY2D, dstDevice);
SAME_FIELD(Memcpy2D, dst_pitch, CUDA_MEMCPY2D, dstPitch);
SAME_FIELD(Memcpy2D, width_bytes, CUDA_MEMCPY2D, WidthInBytes);
SAME_FIELD(Memcpy2D, height, CUDA_MEMCPY2D, Height);

SAME_SIZE(MemOp, CUstreamBatchMemOpParams);
SAME_FIELD(MemOp, address, CUstreamBatchMemOpParams, waitValue.address);
SAME_FIELD(MemOp, value, CUstreamBatchMemOpParams, waitValue.value);
SAME_FIELD(MemOp, flags, CUstreamBatchMemOpParams, waitValue.flags);
SAME_FIELD(MemOp, alias, CUstreamBatchMemOpParams, waitValue.alias);
SAME_FIELD(MemOp, address, CUstreamBatchMemOpParams, writeValue.address);
SAME_FIELD(MemOp, value, CUstreamBatchMemOpParams, writeValue.value);
SAME_FIELD(MemOp, flags, CUstreamBatchMemOpParams, writeValue.flags);

// Each entry point: as many parameters as in cuda.h, of the same sizes (ours are spelled without its types).
template <class Ours, class Theirs>
struct SameShape : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameShape<R (*)(A...), S(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B)) return false;
    else return ((sizeof(A) == sizeof(B)) && ...);
  }();
};
#define SAME_SHAPE(field, theirs) static_assert(SameShape<decltype(Api::field), decltype(theirs)>::value)

SAME_SHAPE(Init, cuInit);
SAME_SHAPE(DriverGetVersion, cuDriverGetVersion);
SAME_SHAPE(DeviceGetCount, cuDeviceGetCount);
SAME_SHAPE(DeviceGet, cuDeviceGet);
SAME_SHAPE(DeviceGetName, cuDeviceGetName);
SAME_SHAPE(DeviceGetAttribute, cuDeviceGetAttribute);
SAME_SHAPE(DeviceTotalMem, cuDeviceTotalMem);
SAME_SHAPE(DeviceGetUuid, cuDeviceGetUuid);
SAME_SHAPE(DeviceGetPCIBusId, cuDeviceGetPCIBusId);
SAME_SHAPE(DeviceCanAccessPeer, cuDeviceCanAccessPeer);
SAME_SHAPE(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
SAME_SHAPE(CtxPushCurrent, cuCtxPushCurrent);
SAME_SHAPE(CtxPopCurrent, cuCtxPopCurrent);
SAME_SHAPE(CtxGetCurrent, cuCtxGetCurrent);
SAME_SHAPE(CtxGetDevice, cuCtxGetDevice);
SAME_SHAPE(CtxSynchronize, cuCtxSynchronize);
SAME_SHAPE(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange);
SAME_SHAPE(MemGetAllocationGranularity, cuMemGetAllocationGranularity);
SAME_SHAPE(MemCreate, cuMemCreate);
SAME_SHAPE(MemRelease, cuMemRelease);
SAME_SHAPE(MemExportToShareableHandle, cuMemExportToShareableHandle);
SAME_SHAPE(MemImportFromShareableHandle, cuMemImportFromShareableHandle);
SAME_SHAPE(MemAddressReserve, cuMemAddressReserve);
SAME_SHAPE(MemAddressFree, cuMemAddressFree);
SAME_SHAPE(MemMap, cuMemMap);
SAME_SHAPE(MemUnmap, cuMemUnmap);
SAME_SHAPE(MemSetAccess, cuMemSetAccess);
SAME_SHAPE(MemAlloc, cuMemAlloc);
SAME_SHAPE(MemFree, cuMemFree);
SAME_SHAPE(MemHostAlloc, cuMemHostAlloc);
SAME_SHAPE(MemFreeHost, cuMemFreeHost);
SAME_SHAPE(MemHostGetDevicePointer, cuMemHostGetDevicePointer);
SAME_SHAPE(StreamCreateWithPriority, cuStreamCreateWithPriority);
SAME_SHAPE(StreamDestroy, cuStreamDestroy);
SAME_SHAPE(StreamGetCtx, cuStreamGetCtx);
SAME_SHAPE(StreamWaitEvent, cuStreamWaitEvent);
SAME_SHAPE(EventCreate, cuEventCreate);
SAME_SHAPE(EventDestroy, cuEventDestroy);
SAME_SHAPE(EventRecord, cuEventRecord);
SAME_SHAPE(EventQuery, cuEventQuery);
SAME_SHAPE(StreamBatchMemOp, cuStreamBatchMemOp);
SAME_SHAPE(MemcpyDtoHAsync, cuMemcpyDtoHAsync);
SAME_SHAPE(MemcpyHtoDAsync, cuMemcpyHtoDAsync);
SAME_SHAPE(MemcpyDtoDAsync, cuMemcpyDtoDAsync);
SAME_SHAPE(Memcpy2DAsync, cuMemcpy2DAsync);
SAME_SHAPE(MemsetD8Async, cuMemsetD8Async);
SAME_SHAPE(LaunchKernel, cuLaunchKernel);
SAME_SHAPE(FuncSetAttribute, cuFuncSetAttribute);
SAME_SHAPE(GetErrorName, cuGetErrorName);
SAME_SHAPE(GetErrorString, cuGetErrorString);
SAME_SHAPE(ModuleLoadData, cuModuleLoadData);
SAME_SHAPE(ModuleGetFunction, cuModuleGetFunction);
SAME_SHAPE(ModuleUnload, cuModuleUnload);
#if CUDA_VERSION >= 12050
SAME_SHAPE(CtxRecordEvent, cuCtxRecordEvent);
#endif
#if CUDA_VERSION >= 12080
SAME_VALUE(kSourceInStreamOrder, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME_VALUE(kPreferOverlapWithCompute, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
SAME_VALUE(kOperandPointer, CU_MEMCPY_OPERAND_TYPE_POINTER);
SAME_SIZE(MemcpyAttributes, CUmemcpyAttributes);
SAME_FIELD(MemcpyAttributes, source_order, CUmemcpyAttributes, srcAccessOrder);
SAME_FIELD(MemcpyAttributes, source_hint, CUmemcpyAttributes, srcLocHint);
SAME_FIELD(MemcpyAttributes, target_hint, CUmemcpyAttributes, dstLocHint);
SAME_FIELD(MemcpyAttributes, flags, CUmemcpyAttributes, flags);
SAME_SIZE(MemcpyOperand, CUmemcpy3DOperand);
SAME_FIELD(MemcpyOperand, type, CUmemcpy3DOperand, type);
SAME_FIELD(MemcpyOperand, address, CUmemcpy3DOperand, op.ptr.ptr);
SAME_FIELD(MemcpyOperand, row_length, CUmemcpy3DOperand, op.ptr.rowLength);
SAME_FIELD(MemcpyOperand, layer_height, CUmemcpy3DOperand, op.ptr.layerHeight);
SAME_FIELD(MemcpyOperand, hint, CUmemcpy3DOperand, op.ptr.locHint);
SAME_SIZE(MemcpyBatchOp, CUDA_MEMCPY3D_BATCH_OP);
SAME_FIELD(MemcpyBatchOp, src, CUDA_MEMCPY3D_BATCH_OP, src);
SAME_FIELD(MemcpyBatchOp, dst, CUDA_MEMCPY3D_BATCH_OP, dst);
SAME_FIELD(MemcpyBatchOp, extent, CUDA_MEMCPY3D_BATCH_OP, extent);
SAME_FIELD(MemcpyBatchOp, source_order, CUDA_MEMCPY3D_BATCH_OP, srcAccessOrder);
SAME_FIELD(MemcpyBatchOp, flags, CUDA_MEMCPY3D_BATCH_OP, flags);
#if CUDA_VERSION < 13000  // whose header names a second version of each; the driver keeps the first
SAME_SHAPE(MemcpyBatchAsync, cuMemcpyBatchAsync);
SAME_SHAPE(Memcpy3DBatchAsync, cuMemcpy3DBatchAsync);
#endif
#endif
#if CUDA_VERSION >= 12010
SAME_SIZE(MulticastObjectProp, CUmulticastObjectProp);
SAME_FIELD(MulticastObjectProp, devices, CUmulticastObjectProp, numDevices);
SAME_FIELD(MulticastObjectProp, size, CUmulticastObjectProp, size);
SAME_FIELD(MulticastObjectProp, handle_types, CUmulticastObjectProp, handleTypes);
SAME_FIELD(MulticastObjectProp, flags, CUmulticastObjectProp, flags);
SAME_VALUE(kMulticastGranularityMinimum, CU_MULTICAST_GRANULARITY_MINIMUM);
SAME_SHAPE(MulticastCreate, cuMulticastCreate);
SAME_SHAPE(MulticastAddDevice, cuMulticastAddDevice);
SAME_SHAPE(MulticastBindMem, cuMulticastBindMem);
SAME_SHAPE(MulticastUnbind, cuMulticastUnbind);
SAME_SHAPE(MulticastGetGranularity, cuMulticastGetGranularity);
#endif

}  // namespace tide::cuda
