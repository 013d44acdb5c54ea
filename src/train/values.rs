//! The elements of a checkpoint's tensors in their storage types: on disk as in memory, little-endian.

use crate::graph::DType;
use crate::ops::round;
use safetensors::tensor::Dtype;
use std::io::{self, Read};

/// Elements converted at a time.
const CHUNK: usize = 1 << 16;

/// How files call a storage type.
pub(super) fn file_type(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::U32 => Dtype::U32,
    }
}

/// The reverse, of the types that are read.
pub(super) fn memory_type(dtype: Dtype) -> Option<DType> {
    [DType::F32, DType::F16, DType::BF16].into_iter().find(|d| file_type(*d) == dtype)
}

/// Hands the little-endian bytes of `data`, stored as `dtype`, to `sink`, a chunk at a time.
pub(super) fn write_values(
    sink: &mut impl FnMut(&[u8]) -> io::Result<()>,
    dtype: DType,
    data: &[f32],
) -> io::Result<()> {
    if dtype.is_half() {
        return data.chunks(CHUNK).try_for_each(|chunk| {
            let bytes: Vec<u8> = chunk.iter().flat_map(|x| round::store(dtype, *x).to_le_bytes()).collect();
            sink(&bytes)
        });
    }
    if cfg!(target_endian = "little") {
        return sink(bytemuck::cast_slice(data));
    }
    data.chunks(CHUNK).try_for_each(|chunk| {
        let bytes: Vec<u8> = chunk.iter().flat_map(|x| x.to_le_bytes()).collect();
        sink(&bytes)
    })
}

/// Fills `data` from little-endian bytes of `dtype`, a chunk at a time; `each` sees them.
pub(super) fn read_values(
    input: &mut impl Read,
    dtype: DType,
    data: &mut [f32],
    each: &mut dyn FnMut(&[u8]),
) -> io::Result<()> {
    if dtype.is_half() {
        let mut bytes = vec![0; 2 * CHUNK.min(data.len())];
        for chunk in data.chunks_mut(CHUNK) {
            let bytes = &mut bytes[..2 * chunk.len()];
            input.read_exact(bytes)?;
            each(bytes);
            for (x, b) in chunk.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *x = round::load(dtype, u16::from_le_bytes(*b));
            }
        }
        return Ok(());
    }
    for chunk in data.chunks_mut(CHUNK) {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(chunk);
        input.read_exact(bytes)?;
        each(bytes);
        chunk.iter_mut().for_each(|x| *x = f32::from_bits(u32::from_le(x.to_bits())));
    }
    Ok(())
}
