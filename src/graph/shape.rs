//! Static shapes of rank 0 to 4, small enough to copy.

use std::fmt;

/// The largest rank a tensor may have.
pub const MAX_RANK: usize = 4;

/// A static shape, row-major, last axis contiguous. Rank 0 does not occur: a scalar is `[1]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [u32; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// A shape from its dimensions.
    ///
    /// # Panics
    /// If there are none or more than four, or one is zero: shapes come from validated configurations.
    pub fn new(dims: &[usize]) -> Self {
        assert!(!dims.is_empty() && dims.len() <= MAX_RANK, "rank {} is not in 1..=4", dims.len());
        let mut s = Shape { dims: [1; MAX_RANK], rank: dims.len() as u8 };
        for (d, &v) in s.dims.iter_mut().zip(dims) {
            assert!(v > 0 && v <= u32::MAX as usize, "dimension {v} of {dims:?} is out of range");
            *d = v as u32;
        }
        s
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Size of axis `i`.
    pub fn dim(&self, i: usize) -> usize {
        assert!(i < self.rank());
        self.dims[i] as usize
    }

    /// Size of the last axis.
    pub fn last(&self) -> usize {
        self.dim(self.rank() - 1)
    }

    /// All sizes.
    pub fn dims(&self) -> Vec<usize> {
        self.dims[..self.rank()].iter().map(|&d| d as usize).collect()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.dims[..self.rank()].iter().map(|&d| d as usize).product()
    }

    /// Shapes hold at least one element; here for the lint's sake.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Product of all axes but the last: the number of rows.
    pub fn rows(&self) -> usize {
        self.len() / self.last()
    }

    /// The shape that `self` and `other` broadcast to (aligned at the last axis, size 1 stretches).
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let mut dims = vec![0; rank];
        for (i, d) in dims.iter_mut().enumerate() {
            let (a, b) = (self.aligned(i, rank), other.aligned(i, rank));
            *d = if a == b || b == 1 {
                a
            } else if a == 1 {
                b
            } else {
                return None;
            };
        }
        Some(Shape::new(&dims))
    }

    /// Size of axis `i` when the shape is aligned at the right in `rank` axes.
    pub fn aligned(&self, i: usize, rank: usize) -> usize {
        let lead = rank - self.rank();
        if i < lead { 1 } else { self.dim(i - lead) }
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &self.dims[..self.rank()])
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl From<&[usize]> for Shape {
    fn from(d: &[usize]) -> Self {
        Shape::new(d)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(d: [usize; N]) -> Self {
        Shape::new(&d)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_aligns_at_the_last_axis() {
        let a = Shape::new(&[5, 3, 4]);
        assert_eq!(a.broadcast(&Shape::new(&[4])), Some(a));
        assert_eq!(a.broadcast(&Shape::new(&[3, 1])), Some(a));
        assert_eq!(Shape::new(&[5, 1, 1]).broadcast(&Shape::new(&[3, 4])), Some(a));
        assert_eq!(a.broadcast(&Shape::new(&[3])), None);
    }
}
