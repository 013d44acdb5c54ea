//! Where the delimiters and line breaks of a text are, found 64 bytes at a time.

/// Where the fields of a block's lines are.
#[derive(Default)]
pub(crate) struct Marks {
    /// Places of delimiters and line breaks; in front of the first line stands one as well, so that field i lies
    /// between marks i and i + 1. What follows the last line is left over.
    pub places: Vec<u32>,
    /// Of each line break its index there; a last line without one has one at the text's end. Cut at `count`.
    lines: Vec<u32>,
    count: usize,
}

/// One bit a byte of a block of 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Masks {
    /// Delimiters and line breaks.
    found: u64,
    /// Line breaks.
    breaks: u64,
    /// Bytes above 127.
    high: u64,
}

impl Marks {
    /// Of each line break its index in `places`; a last line without one has one at the text's end.
    pub fn lines(&self) -> &[u32] {
        &self.lines[..self.count]
    }

    /// Finds them in a text that stands at `base` of its block; whether all bytes are ASCII.
    pub fn find(&mut self, text: &[u8], base: usize, delimiter: u8) -> bool {
        #[cfg(target_arch = "x86_64")]
        match level() {
            // SAFETY: the processor has what the function is compiled for.
            Level::Avx512 => unsafe { self.find_512(text, base, delimiter) },
            // SAFETY: the same.
            Level::Avx2 => unsafe { self.find_256(text, base, delimiter) },
            Level::Any => self.find_128(text, base, delimiter),
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.find_in_words(text, base, delimiter)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn find_512(&mut self, text: &[u8], base: usize, delimiter: u8) -> bool {
        self.find_by(
            text,
            base,
            |b| x86::masks_512(b, delimiter),
            |at, found, p| x86::write_512(at, found, p),
        )
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn find_256(&mut self, text: &[u8], base: usize, delimiter: u8) -> bool {
        self.find_by(text, base, |b| x86::masks_256(b, delimiter), write_bits)
    }

    #[cfg(target_arch = "x86_64")]
    fn find_128(&mut self, text: &[u8], base: usize, delimiter: u8) -> bool {
        // SAFETY: SSE2 is part of every x86-64.
        let masks = |b: &[u8; 64]| unsafe { x86::masks_128(b, delimiter) };
        self.find_by(text, base, masks, write_bits)
    }

    #[cfg(any(test, not(target_arch = "x86_64")))]
    fn find_in_words(&mut self, text: &[u8], base: usize, delimiter: u8) -> bool {
        self.find_by(text, base, |b| masks_of_words(b, delimiter), write_bits)
    }

    /// The search with two parts that depend on the processor: the masks of a block, and the places of a mask's bits
    /// (`at` and their number) into an array whose rest may be overwritten.
    #[inline(always)]
    fn find_by(
        &mut self,
        text: &[u8],
        base: usize,
        masks: impl Fn(&[u8; 64]) -> Masks,
        write: impl Fn(u32, u64, &mut [u32; 64]),
    ) -> bool {
        let Marks { places, lines, count: line } = self;
        places.resize(places.len().max(256), 0);
        lines.resize(lines.len().max(256), 0);
        places[0] = (base as u32).wrapping_sub(1);
        let (mut n, mut l) = (1, 0);
        let mut high = 0u64;
        let mut at = base as u32;
        let (blocks, rest) = text.as_chunks::<64>();
        let mut last = [0; 64];
        last[..rest.len()].copy_from_slice(rest);
        // zeros are no delimiters, unless a NUL is one
        let real = (1u64 << rest.len()) - 1;
        for (i, block) in blocks.iter().chain(std::iter::once(&last)).enumerate() {
            let mut m = masks(block);
            if i == blocks.len() {
                m = Masks { found: m.found & real, breaks: m.breaks & real, high: m.high & real };
            }
            high |= m.high;
            if places.len() < n + 64 {
                places.resize(2 * places.len(), 0);
            }
            if lines.len() < l + 64 {
                lines.resize(2 * lines.len(), 0);
            }
            if let Some(free) = places[n..].first_chunk_mut() {
                write(at, m.found, free);
            }
            // most often one or none, which no processor foresees: written either way
            let mut breaks = m.breaks;
            loop {
                let before = m.found & (breaks & breaks.wrapping_neg()).wrapping_sub(1);
                lines[l] = n as u32 + before.count_ones();
                l += usize::from(breaks != 0);
                breaks &= breaks.wrapping_sub(1);
                if breaks == 0 {
                    break;
                }
            }
            n += m.found.count_ones() as usize;
            at = at.wrapping_add(64);
        }
        if !text.is_empty() && text.last() != Some(&b'\n') {
            places.truncate(n);
            places.push((base + text.len()) as u32);
            lines.truncate(l);
            lines.push(n as u32);
            l += 1;
        }
        *line = l;
        high == 0
    }
}

/// The places of a mask's bits.
#[inline(always)]
fn write_bits(at: u32, mut bits: u64, places: &mut [u32; 64]) {
    let count = bits.count_ones() as usize;
    let mut put = |part: &mut [u32]| {
        for place in part {
            *place = at + bits.trailing_zeros();
            bits &= bits.wrapping_sub(1);
        }
    };
    // no processor foresees how many there are: most often no more than these
    put(&mut places[..16]);
    if count > 16 {
        put(&mut places[16..24]);
    }
    if count > 24 {
        put(&mut places[24..count]);
    }
}

/// Eight bytes at a time.
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline]
fn masks_of_words(block: &[u8; 64], delimiter: u8) -> Masks {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let (d, n) = (u64::from_ne_bytes([delimiter; 8]), u64::from_ne_bytes([b'\n'; 8]));
    // the top bit of each byte that is zero, exactly (Mycroft's test without its false positives)
    let zero = |x: u64| !(((x & LOW) + LOW) | x | LOW);
    // the top bits of eight bytes as eight bits
    let gather = |x: u64| ((x >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) & 0xff;
    let mut m = Masks { found: 0, breaks: 0, high: 0 };
    for (i, eight) in block.as_chunks().0.iter().enumerate() {
        let x = u64::from_le_bytes(*eight);
        let breaks = gather(zero(x ^ n)) << (8 * i);
        m.found |= gather(zero(x ^ d)) << (8 * i) | breaks;
        m.breaks |= breaks;
        m.high |= gather(x & !LOW) << (8 * i);
    }
    m
}

/// What a processor has.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(crate) enum Level {
    /// What every x86-64 has.
    Any,
    /// AVX2 and the instructions on bits that came with it.
    Avx2,
    /// These and AVX-512 with its compression of bytes (Ice Lake, Zen 4 and later).
    Avx512,
}

/// What this processor has.
#[cfg(target_arch = "x86_64")]
pub(crate) fn level() -> Level {
    macro_rules! has {
        ($($name:tt)*) => { true $(&& is_x86_feature_detected!($name))* };
    }
    if !has!("avx2" "bmi1" "bmi2" "lzcnt" "popcnt") {
        Level::Any
    } else if has!("avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vbmi2") {
        Level::Avx512
    } else {
        Level::Avx2
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Masks;

    #[inline]
    #[target_feature(enable = "sse2")]
    pub fn masks_128(block: &[u8; 64], delimiter: u8) -> Masks {
        let (d, n) = (_mm_set1_epi8(delimiter as i8), _mm_set1_epi8(b'\n' as i8));
        let mut m = Masks { found: 0, breaks: 0, high: 0 };
        for (i, part) in block.as_chunks::<16>().0.iter().enumerate() {
            // SAFETY: 16 bytes are read from an array of as many.
            let x = unsafe { _mm_loadu_si128(part.as_ptr().cast()) };
            let bits = |x: __m128i| (_mm_movemask_epi8(x) as u64) << (16 * i);
            let breaks = _mm_cmpeq_epi8(x, n);
            m.breaks |= bits(breaks);
            m.found |= bits(_mm_or_si128(_mm_cmpeq_epi8(x, d), breaks));
            m.high |= bits(x);
        }
        m
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn masks_256(block: &[u8; 64], delimiter: u8) -> Masks {
        let (d, n) = (_mm256_set1_epi8(delimiter as i8), _mm256_set1_epi8(b'\n' as i8));
        let mut m = Masks { found: 0, breaks: 0, high: 0 };
        for (i, half) in block.as_chunks::<32>().0.iter().enumerate() {
            // SAFETY: 32 bytes are read from an array of as many.
            let x = unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
            let bits = |x: __m256i| u64::from(_mm256_movemask_epi8(x) as u32) << (32 * i);
            let breaks = _mm256_cmpeq_epi8(x, n);
            m.breaks |= bits(breaks);
            m.found |= bits(_mm256_or_si256(_mm256_cmpeq_epi8(x, d), breaks));
            m.high |= bits(x);
        }
        m
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub fn masks_512(block: &[u8; 64], delimiter: u8) -> Masks {
        // SAFETY: 64 bytes are read from an array of as many.
        let x = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
        let breaks = _mm512_cmpeq_epi8_mask(x, _mm512_set1_epi8(b'\n' as i8));
        let found = _mm512_cmpeq_epi8_mask(x, _mm512_set1_epi8(delimiter as i8)) | breaks;
        Masks { found, breaks, high: _mm512_movepi8_mask(x) }
    }

    /// The numbers of the set bits are the bytes 0 to 63 with the others left out.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
    pub fn write_512(at: u32, bits: u64, places: &mut [u32; 64]) {
        const NUMBERS: [u8; 64] = {
            let mut n = [0; 64];
            let mut i = 0;
            while i < 64 {
                n[i] = i as u8;
                i += 1;
            }
            n
        };
        // SAFETY: 64 bytes are read from an array of as many.
        let numbers = unsafe { _mm512_loadu_si512(NUMBERS.as_ptr().cast()) };
        let packed = _mm512_maskz_compress_epi8(bits, numbers);
        let at = _mm512_set1_epi32(at as i32);
        let (parts, _) = places.as_chunks_mut::<16>();
        let put = |part: &mut [u32; 16], bytes: __m128i| {
            let wide = _mm512_add_epi32(_mm512_cvtepu8_epi32(bytes), at);
            // SAFETY: 16 numbers are written to an array of as many.
            unsafe { _mm512_storeu_si512(part.as_mut_ptr().cast(), wide) };
        };
        put(&mut parts[0], _mm512_extracti32x4_epi32::<0>(packed));
        put(&mut parts[1], _mm512_extracti32x4_epi32::<1>(packed));
        if bits.count_ones() > 32 {
            put(&mut parts[2], _mm512_extracti32x4_epi32::<2>(packed));
            put(&mut parts[3], _mm512_extracti32x4_epi32::<3>(packed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Find = fn(&mut Marks, &[u8], usize, u8) -> bool;

    /// Every way that this processor can go.
    fn ways() -> Vec<Find> {
        let mut ways: Vec<Find> = vec![Marks::find, Marks::find_in_words];
        #[cfg(target_arch = "x86_64")]
        {
            ways.push(Marks::find_128);
            if level() >= Level::Avx2 {
                // SAFETY: just asked for.
                ways.push(|m, text, base, d| unsafe { m.find_256(text, base, d) });
            }
            if level() >= Level::Avx512 {
                // SAFETY: just asked for.
                ways.push(|m, text, base, d| unsafe { m.find_512(text, base, d) });
            }
        }
        ways
    }

    proptest! {
        #[test]
        fn marks_are_where_the_bytes_are(
            text in prop::collection::vec(prop::sample::select(b"\t\n\x08\x0b\x89\x8a\x00ab".to_vec()), 0..300),
            plain in 0usize..100,
            delimiter in prop::sample::select(b"\t\x00".to_vec()),
        ) {
            // dense and sparse, and more than the first memory holds
            let text = [&text[..], &vec![b'x'; plain], &text.repeat(3)].concat();
            let mut want: Vec<usize> =
                (0..text.len()).filter(|&i| text[i] == delimiter || text[i] == b'\n').collect();
            let mut breaks: Vec<usize> = (0..text.len()).filter(|&i| text[i] == b'\n').collect();
            if !text.is_empty() && text.last() != Some(&b'\n') {
                want.push(text.len());
                breaks.push(text.len());
            }
            for find in ways() {
                let mut marks = Marks::default();
                for _ in 0..2 {
                    let ascii = find(&mut marks, &text, 3, delimiter);
                    let places: Vec<usize> =
                        marks.places[1..=want.len()].iter().map(|&p| p as usize - 3).collect();
                    prop_assert_eq!(&places, &want);
                    let lines: Vec<usize> =
                        marks.lines().iter().map(|&l| marks.places[l as usize] as usize - 3).collect();
                    prop_assert_eq!(&lines, &breaks);
                    prop_assert_eq!(marks.places[0], 2);
                    prop_assert_eq!(ascii, text.is_ascii());
                }
            }
        }
    }
}
