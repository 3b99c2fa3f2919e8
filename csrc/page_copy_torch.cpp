// The kernel of page_copy.cu for torch: tensors checked, then the plain launcher. Built by hicache/kernel.py.
#include <torch/extension.h>

#include <cstdint>

extern "C" int deepinfer_page_copy_launch(void* dst, const std::uint32_t* dst_rows, const void* src,
                                          const std::uint32_t* src_rows, std::int64_t rows, std::int64_t row_bytes,
                                          int blocks, void* stream);
extern "C" const char* deepinfer_page_copy_error(int code);

namespace {

void check_memory(const at::Tensor& memory, const char* name) {
    TORCH_CHECK(memory.dim() == 2 && memory.scalar_type() == at::kByte && memory.is_contiguous(), name,
                " must be contiguous bytes [rows, row_bytes]");
}

// dst[lists[0][i]] = src[lists[1][i]]: `lists` is int32 [2, k] on the card; `stream` is a cudaStream_t.
void copy_rows(const at::Tensor& dst, const at::Tensor& src, const at::Tensor& lists, std::int64_t blocks,
               std::int64_t stream) {
    check_memory(dst, "dst");
    check_memory(src, "src");
    TORCH_CHECK(dst.size(1) == src.size(1), "rows of ", src.size(1), " bytes cannot be copied to rows of ", dst.size(1));
    TORCH_CHECK(lists.is_cuda() && lists.dim() == 2 && lists.size(0) == 2 && lists.scalar_type() == at::kInt &&
                    lists.is_contiguous(),
                "lists must be contiguous int32 [2, k] on the card");
    const auto* to = reinterpret_cast<const std::uint32_t*>(lists.data_ptr());
    const int status =
        deepinfer_page_copy_launch(dst.data_ptr(), to, src.data_ptr(), to + lists.size(1), lists.size(1), dst.size(1),
                                   static_cast<int>(blocks), reinterpret_cast<void*>(stream));
    TORCH_CHECK(status == 0, "page copy kernel: ", deepinfer_page_copy_error(status));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("copy_rows", &copy_rows); }
