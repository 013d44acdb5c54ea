//! Work spread over threads: rayon's iterators, or where there is one thread only (a browser), plain ones of the
//! same names, which leaves all of rayon out of the page.

#[cfg(not(target_arch = "wasm32"))]
pub use rayon::{current_num_threads, prelude::*};

#[cfg(target_arch = "wasm32")]
pub use alone::*;

#[cfg(any(test, target_arch = "wasm32"))]
#[cfg_attr(not(target_arch = "wasm32"), allow(dead_code, reason = "natively only its tests use it"))]
mod alone {
    use std::slice::{Chunks, ChunksMut, Iter, IterMut};

    /// One.
    pub fn current_num_threads() -> usize {
        1
    }

    /// Of slices.
    pub trait ParallelSlice<T> {
        /// `iter`
        fn par_iter(&self) -> Iter<'_, T>;
        /// `chunks`
        fn par_chunks(&self, size: usize) -> Chunks<'_, T>;
        /// `iter_mut`
        fn par_iter_mut(&mut self) -> IterMut<'_, T>;
        /// `chunks_mut`
        fn par_chunks_mut(&mut self, size: usize) -> ChunksMut<'_, T>;
    }

    impl<T> ParallelSlice<T> for [T] {
        fn par_iter(&self) -> Iter<'_, T> {
            self.iter()
        }

        fn par_chunks(&self, size: usize) -> Chunks<'_, T> {
            self.chunks(size)
        }

        fn par_iter_mut(&mut self) -> IterMut<'_, T> {
            self.iter_mut()
        }

        fn par_chunks_mut(&mut self, size: usize) -> ChunksMut<'_, T> {
            self.chunks_mut(size)
        }
    }

    /// Of ranges, vectors and tuples of iterators, which advance together.
    pub trait IntoParallelIterator {
        /// A plain iterator.
        type Iter: Iterator;
        /// `into_iter`
        fn into_par_iter(self) -> Self::Iter;
    }

    impl IntoParallelIterator for std::ops::Range<usize> {
        type Iter = Self;

        fn into_par_iter(self) -> Self {
            self
        }
    }

    impl<T> IntoParallelIterator for Vec<T> {
        type Iter = std::vec::IntoIter<T>;

        fn into_par_iter(self) -> Self::Iter {
            self.into_iter()
        }
    }

    /// Four iterators that advance together.
    pub struct Together<A, B, C, D>(A, B, C, D);

    impl<A: Iterator, B: Iterator, C: Iterator, D: Iterator> Iterator for Together<A, B, C, D> {
        type Item = (A::Item, B::Item, C::Item, D::Item);

        fn next(&mut self) -> Option<Self::Item> {
            Some((self.0.next()?, self.1.next()?, self.2.next()?, self.3.next()?))
        }
    }

    impl<A: Iterator, B: Iterator, C: Iterator, D: Iterator> IntoParallelIterator for (A, B, C, D) {
        type Iter = Together<A, B, C, D>;

        fn into_par_iter(self) -> Self::Iter {
            Together(self.0, self.1, self.2, self.3)
        }
    }

    /// What rayon's iterators have and plain ones do not.
    pub trait ParallelIterator: Iterator + Sized {
        /// `for_each` with scratch that is made once.
        fn for_each_init<S>(self, init: impl Fn() -> S, f: impl Fn(&mut S, Self::Item)) {
            let mut scratch = init();
            self.for_each(|x| f(&mut scratch, x));
        }

        /// `map` with scratch that is made once.
        fn map_init<S, R>(
            self,
            init: impl Fn() -> S,
            f: impl Fn(&mut S, Self::Item) -> R,
        ) -> impl Iterator<Item = R> {
            let mut scratch = init();
            self.map(move |x| f(&mut scratch, x))
        }
    }

    impl<I: Iterator> ParallelIterator for I {}
}

#[cfg(test)]
mod tests {
    use super::alone;

    #[test]
    fn one_thread_does_what_many_do() {
        let x: Vec<usize> = (0..100).collect();
        let work = |c: &[usize]| c.iter().sum::<usize>();
        let many: Vec<usize> = rayon::prelude::ParallelIterator::collect(
            rayon::prelude::ParallelIterator::map(rayon::prelude::ParallelSlice::par_chunks(&x[..], 7), work),
        );
        let one: Vec<usize> = alone::ParallelSlice::par_chunks(&x[..], 7).map(work).collect();
        assert_eq!(many, one);
        let four = (x.iter(), x.iter().skip(1), x.iter().skip(2), x.iter().skip(3));
        let sums = alone::IntoParallelIterator::into_par_iter(four).map(|(a, b, c, d)| a + b + c + d);
        assert_eq!(sums.collect::<Vec<_>>().last(), Some(&(96 + 97 + 98 + 99)));
        let scratch = alone::ParallelIterator::map_init(0..5, Vec::new, |v, x| {
            v.push(x);
            v.len()
        });
        assert_eq!(scratch.collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert_eq!(alone::current_num_threads(), 1);
    }
}
