//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock that survives a panic elsewhere: what it guards is consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
