//! Whether a run fits into the machine's memory, asked before anything is allocated: afterwards the system
//! would end the process.

use crate::memory::lacks;

/// An error that says what to lower, if `needed` bytes are more than there are.
pub fn check(needed: usize) -> anyhow::Result<()> {
    match lacks(needed) {
        Some(free) => anyhow::bail!(
            "training needs about {:.1} GB of memory and {:.1} GB are free; lower train.batch, model.width, \
             model.slots, data.buckets or data.max_size (`birkhoff inspect` shows what takes how much)",
            needed as f64 / 1e9,
            free as f64 / 1e9
        ),
        None => Ok(()),
    }
}

/// The same of weights that are to be used: about so many numbers.
pub fn check_weights(numbers: usize) -> anyhow::Result<()> {
    match lacks(numbers.saturating_mul(8)) {
        Some(free) => anyhow::bail!(
            "the run's weights need about {:.1} GB of memory and {:.1} GB are free; free some, or use a machine with more",
            numbers as f64 * 8e-9,
            free as f64 / 1e9
        ),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_fit_is_refused_and_what_is_small_is_not() {
        assert!(check(1 << 20).is_ok());
        if crate::memory::available().is_some() {
            let e = check(usize::MAX / 2).unwrap_err().to_string();
            assert!(e.contains("train.batch") && !e.contains('\n'), "{e}");
            assert!(check_weights(usize::MAX / 2).is_err());
        }
    }
}
