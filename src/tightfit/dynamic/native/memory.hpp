// Storages whose memory is taken away and given back under the tensors that use them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <cstring>

namespace tightfit::online {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Whether sizes and strides of a tensor describe a view of a storage.
inline bool is_plain(const at::Tensor& tensor) {
    constexpr c10::DispatchKeySet others{
        c10::DispatchKey::Quantized, c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr,
        c10::DispatchKey::NestedTensor};
    return tensor.has_storage() && !tensor.key_set().has_any(others);
}

inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
}

inline Storage shared(c10::StorageImpl* storage) { return Storage::reclaim_copy(storage); }

// Sizes, strides and offset of a tensor in a storage.
class Geometry {
public:
    explicit Geometry(const at::Tensor& tensor)
        : offset_(tensor.storage_offset()),
          dtype_(tensor.dtype()),
          keys_(tensor.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView) {
        shape_.set_sizes(tensor.sizes());
        shape_.set_strides(tensor.strides());
    }

    at::Tensor in(Storage storage) const {
        auto tensor = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(std::move(storage)), keys_, dtype_);
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
            shape_.sizes_arrayref(), shape_.strides_arrayref(), offset_);
        return tensor;
    }

private:
    c10::impl::SizesAndStrides shape_;
    std::int64_t offset_;
    caffe2::TypeMeta dtype_;
    c10::DispatchKeySet keys_;
};

// Frees the memory of a storage. It keeps its size, so that views of it can be made; code that reads
// or writes it gets an error from now on.
inline void take_memory(c10::StorageImpl& storage) {
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
        "tightfit.online has evicted this tensor, and something outside PyTorch's operators asks "
        "for its data pointer: let an operator read it inside the region, or use region.keep");
}

// Gives a storage the memory of another one of the same size, which is left without.
inline void fill(c10::StorageImpl& storage, c10::StorageImpl& other) {
    c10::DataPtr memory = std::move(other._mutable_data_ptr_no_checks());
    storage.clear_data_ptr_access_error_msg_();
    storage.set_data_ptr_noswap(std::move(memory));
}

// Returns memory of the allocator that operators ask, whose limit holds for it.
inline Storage new_memory(std::int64_t size_bytes) {
    return c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), size_bytes, c10::GetCPUAllocator(), true);
}

inline Storage copy_of(const Storage& storage) {
    if (storage->device_type() == c10::DeviceType::CPU) {
        Storage copy = new_memory(static_cast<std::int64_t>(storage->nbytes()));
        std::memcpy(copy->mutable_data(), storage->data(), storage->nbytes());
        return copy;
    }
    c10::DispatchKeySet keys(c10::computeDispatchKey(
        at::kByte, at::kStrided, storage->device()));
    auto bytes = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), keys, caffe2::TypeMeta::Make<std::uint8_t>());
    bytes.unsafeGetTensorImpl()->set_sizes_contiguous(
        {static_cast<std::int64_t>(storage->nbytes())});
    return shared(storage_of(at::clone(bytes)));
}

}  // namespace tightfit::online
