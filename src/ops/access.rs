//! How an elementwise operation finds its input element for output element `i`: each input has its own
//! factorisation of the linear index, so broadcasts, slices and reshapes are all the same thing.

use super::Real;
use crate::graph::Shape;

/// `index = offset + Σ_k ((i / Π_{j>k} dims[j]) mod dims[k]) · strides[k]`. Always collapsed: neighbouring
/// axes that can be walked as one are one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// Sizes, outermost first; their product is the number of output elements.
    pub dims: Vec<usize>,
    /// Elements to step per axis; 0 repeats.
    pub strides: Vec<usize>,
    /// First element.
    pub offset: usize,
}

impl Access {
    /// Input element `i` for output element `i`.
    pub fn same(len: usize) -> Self {
        Access { dims: vec![len], strides: vec![1], offset: 0 }
    }

    /// Input of shape `from`, broadcast to `to`.
    pub fn broadcast(from: Shape, to: Shape) -> Self {
        let rank = to.rank();
        let dims = to.dims();
        let mut strides = vec![0; rank];
        let mut step = 1;
        for i in (0..rank).rev() {
            let d = from.aligned(i, rank);
            if d != 1 {
                assert_eq!(d, dims[i], "{from} does not broadcast to {to}");
                strides[i] = step;
            }
            step *= d;
        }
        Access::new(dims, strides, 0)
    }

    /// Any strides, collapsed.
    pub fn new(dims: Vec<usize>, strides: Vec<usize>, offset: usize) -> Self {
        let mut d: Vec<usize> = vec![];
        let mut s: Vec<usize> = vec![];
        for (dim, stride) in dims.into_iter().zip(strides) {
            if dim == 1 {
                continue;
            }
            if let (Some(ld), Some(ls)) = (d.last_mut(), s.last_mut())
                && *ls == dim * stride
            {
                *ld *= dim;
                *ls = stride;
                continue;
            }
            d.push(dim);
            s.push(stride);
        }
        if d.is_empty() {
            d.push(1);
            s.push(0);
        }
        Access { dims: d, strides: s, offset }
    }

    /// Number of output elements that it covers.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Never: shapes have elements.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Element `i` of the input is element `i` of the output.
    pub fn is_same(&self) -> bool {
        self.offset == 0 && self.dims.len() == 1 && (self.strides[0] == 1 || self.dims[0] == 1)
    }

    /// One value for all.
    pub fn is_scalar(&self) -> bool {
        self.dims.len() == 1 && self.strides[0] == 0
    }

    /// Four neighbouring outputs read four neighbouring (aligned) inputs, or one.
    pub fn vec4(&self) -> bool {
        let k = self.dims.len() - 1;
        match self.strides[k] {
            _ if self.is_scalar() => true,
            0 => self.dims[k].is_multiple_of(4),
            1 => {
                self.dims[k].is_multiple_of(4)
                    && self.offset.is_multiple_of(4)
                    && self.strides[..k].iter().all(|s| s.is_multiple_of(4))
            }
            _ => false,
        }
    }

    /// Whether the innermost axis repeats one value.
    pub fn inner_repeats(&self) -> bool {
        *self.strides.last().expect("rank ≥ 1") == 0
    }

    /// Fills `buf` with the inputs of outputs `start .. start + buf.len()`.
    ///
    /// # Safety
    /// `src` must be readable wherever the access points for these outputs.
    #[inline(always)]
    pub unsafe fn load<T: Real>(&self, src: *const T, start: usize, buf: &mut [T]) {
        if self.is_same() {
            // SAFETY: by the caller; buf is a different buffer (a register block).
            unsafe { std::ptr::copy_nonoverlapping(src.add(start), buf.as_mut_ptr(), buf.len()) };
            return;
        }
        let k = self.dims.len() - 1;
        let (inner, step) = (self.dims[k], self.strides[k]);
        let mut done = 0;
        while done < buf.len() {
            let i = start + done;
            let pos = i % inner;
            let mut rest = i / inner;
            let mut base = self.offset;
            for a in (0..k).rev() {
                base += (rest % self.dims[a]) * self.strides[a];
                rest /= self.dims[a];
            }
            let n = (inner - pos).min(buf.len() - done);
            let out = &mut buf[done..done + n];
            // SAFETY: by the caller.
            unsafe {
                match step {
                    0 => out.fill(*src.add(base)),
                    1 => std::ptr::copy_nonoverlapping(src.add(base + pos), out.as_mut_ptr(), n),
                    s => {
                        for (j, o) in out.iter_mut().enumerate() {
                            *o = *src.add(base + (pos + j) * s);
                        }
                    }
                }
            }
            done += n;
        }
    }

    /// WGSL expression of the index for output `i` (an expression text); sizes come from
    /// `p[first], p[first + 1], …` (see [`Access::params`]). Returns (text, parameters used).
    pub fn wgsl_index(&self, i: &str, first: usize) -> String {
        if self.is_same() {
            return i.to_string();
        }
        if self.is_scalar() {
            return if self.offset == 0 { "0u".into() } else { param(first) };
        }
        // params: offset, then dims[1..] (the outermost needs no modulo), then strides
        let k = self.dims.len();
        let mut terms = vec![];
        if self.offset != 0 {
            terms.push(param(first));
        }
        let mut rest = i.to_string();
        for a in (0..k).rev() {
            let coord = if a == 0 { rest.clone() } else { format!("({rest} % {})", param(first + 1 + a)) };
            match self.strides[a] {
                0 => {}
                1 => terms.push(coord),
                _ => terms.push(format!("{coord} * {}", param(first + 1 + k + a))),
            }
            if a > 0 {
                rest = format!("({rest} / {})", param(first + 1 + a));
            }
        }
        if terms.is_empty() { "0u".into() } else { terms.join(" + ") }
    }

    /// Values of the parameters of [`Access::wgsl_index`]; `unit` divides the innermost axis (4 for vec4).
    pub fn params(&self, unit: usize) -> Vec<u32> {
        if self.is_same() {
            return vec![];
        }
        if self.is_scalar() {
            return if self.offset == 0 { vec![] } else { vec![self.offset as u32] };
        }
        let k = self.dims.len();
        let repeats = self.inner_repeats();
        // vec4: outputs count in fours; a contiguous input counts in fours too, a repeating one does not
        let div = |v: usize| if repeats { v } else { v / unit };
        let mut p = vec![div(self.offset) as u32];
        for (a, d) in self.dims.iter().enumerate() {
            p.push((if a == k - 1 { d / unit } else { *d }) as u32);
        }
        for (a, s) in self.strides.iter().enumerate() {
            p.push((if a == k - 1 { *s } else { div(*s) }) as u32);
        }
        p
    }

    /// Distinguishes accesses whose WGSL differs (sizes are parameters, structure is text).
    pub fn pattern(&self) -> Vec<u8> {
        if self.is_same() {
            return vec![255];
        }
        let mut v = vec![self.offset.min(1) as u8];
        v.extend(self.strides.iter().map(|s| (*s).min(2) as u8));
        v
    }
}

/// WGSL text of parameter `i` in `array<vec4<u32>>` packing.
pub fn param(i: usize) -> String {
    format!("p.v[{}].{}", i / 4, ["x", "y", "z", "w"][i % 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasts_collapse_and_load() {
        let a = Access::broadcast(Shape::new(&[3, 1]), Shape::new(&[2, 3, 4]));
        assert_eq!(a, Access { dims: vec![2, 3, 4], strides: vec![0, 1, 0], offset: 0 });
        let src = [10.0f64, 20.0, 30.0];
        let mut buf = [0.0; 7];
        // SAFETY: src has the three elements that the access names.
        unsafe { a.load(src.as_ptr(), 3, &mut buf) };
        assert_eq!(buf, [10.0, 20.0, 20.0, 20.0, 20.0, 30.0, 30.0]);
        assert!(Access::broadcast(Shape::new(&[2, 3, 4]), Shape::new(&[2, 3, 4])).is_same());
        assert!(Access::broadcast(Shape::new(&[1]), Shape::new(&[2, 3, 4])).is_scalar());
        assert!(Access::broadcast(Shape::new(&[8]), Shape::new(&[2, 3, 8])).vec4());
        assert!(!Access::broadcast(Shape::new(&[6]), Shape::new(&[2, 3, 6])).vec4());
    }
}
