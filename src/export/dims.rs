//! Shapes in which the batch is a symbol.
//!
//! A graph of birkhoff has a static batch. The exporter builds it twice, for two batch sizes, and compares: a
//! size that is the same in both is a number, one that grows with the batch is a multiple of it.

use crate::graph::Shape;

/// The two batch sizes. Neither is 1: an axis of one element is treated differently by some builders.
pub const BATCHES: [usize; 2] = [2, 3];

/// One size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// A number.
    Fixed(usize),
    /// So many times the batch.
    Batch(usize),
}

impl Dim {
    /// The size that is `sizes` for [`BATCHES`]; `None` where it is neither constant nor a multiple.
    pub fn of(sizes: [usize; 2]) -> Option<Dim> {
        let [a, b] = sizes;
        if a == b {
            Some(Dim::Fixed(a))
        } else if a * BATCHES[1] == b * BATCHES[0] && a.is_multiple_of(BATCHES[0]) {
            Some(Dim::Batch(a / BATCHES[0]))
        } else {
            None
        }
    }

    /// A number, 1 for one.
    pub fn is_one(self) -> bool {
        self == Dim::Fixed(1)
    }
}

/// A whole shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dims(pub Vec<Dim>);

impl Dims {
    /// From the sizes for both batches.
    pub fn of(a: &[usize], b: &[usize]) -> Option<Dims> {
        if a.len() != b.len() {
            return None;
        }
        a.iter().zip(b).map(|(a, b)| Dim::of([*a, *b])).collect::<Option<Vec<_>>>().map(Dims)
    }

    /// From a graph's shapes.
    pub fn of_shapes(a: Shape, b: Shape) -> Option<Dims> {
        Dims::of(&a.dims(), &b.dims())
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The operand of ONNX's `Reshape`: -1 for the axis that holds the batch. `None` with two such axes.
    pub fn target(&self) -> Option<Vec<i64>> {
        let batches = self.0.iter().filter(|d| matches!(d, Dim::Batch(_))).count();
        (batches <= 1).then(|| {
            let size = |d: &Dim| match *d {
                Dim::Fixed(n) => n as i64,
                Dim::Batch(_) => -1,
            };
            self.0.iter().map(size).collect()
        })
    }

    /// Number of elements: one size, fixed or a multiple of the batch. `None` where it is a square of it.
    pub fn len(&self) -> Option<Dim> {
        self.0.iter().try_fold(Dim::Fixed(1), |n, d| match (n, *d) {
            (Dim::Fixed(a), Dim::Fixed(b)) => Some(Dim::Fixed(a * b)),
            (Dim::Fixed(a), Dim::Batch(b)) | (Dim::Batch(a), Dim::Fixed(b)) => Some(Dim::Batch(a * b)),
            _ => None,
        })
    }

    /// As numpy broadcasts.
    pub fn broadcast(&self, other: &Dims) -> Option<Dims> {
        let rank = self.rank().max(other.rank());
        let at = |d: &Dims, i: usize| {
            let lead = rank - d.rank();
            if i < lead { Dim::Fixed(1) } else { d.0[i - lead] }
        };
        let axis = |i: usize| match (at(self, i), at(other, i)) {
            (a, b) if a == b || b.is_one() => Some(a),
            (a, b) if a.is_one() => Some(b),
            _ => None,
        };
        (0..rank).map(axis).collect::<Option<Vec<_>>>().map(Dims)
    }
}

impl std::fmt::Display for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            match d {
                Dim::Fixed(n) => write!(f, "{comma}{n}")?,
                Dim::Batch(1) => write!(f, "{comma}batch")?,
                Dim::Batch(n) => write!(f, "{comma}{n}·batch")?,
            }
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_batch_is_found_by_comparison() {
        let fixed = |sizes: &[usize]| Dims(sizes.iter().map(|&s| Dim::Fixed(s)).collect());
        assert_eq!(Dim::of([5, 5]), Some(Dim::Fixed(5)));
        assert_eq!(Dim::of([2, 3]), Some(Dim::Batch(1)));
        assert_eq!(Dim::of([54, 81]), Some(Dim::Batch(27)));
        assert_eq!(Dim::of([3, 4]), None, "batch + 1 is no multiple");
        let d = Dims::of(&[2, 27, 4], &[3, 27, 4]).expect("multiples");
        assert_eq!((d.target(), d.len()), (Some(vec![-1, 27, 4]), Some(Dim::Batch(108))));
        assert_eq!(d.to_string(), "[batch, 27, 4]");
        let square = Dims(vec![Dim::Batch(1), Dim::Batch(2)]);
        assert_eq!((square.target(), square.len()), (None, None));
        assert_eq!(d.broadcast(&fixed(&[27, 1])), Some(d.clone()));
        assert_eq!(d.broadcast(&fixed(&[3])), None);
    }
}
