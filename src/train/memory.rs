//! Whether a run fits into the machine's memory, asked before anything is allocated: afterwards the system
//! would end the process without a word.

/// Bytes that this process may still take; `None` where the system does not say.
fn available() -> Option<u64> {
    let number = |file: &str| std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let machine = line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok()? * 1024;
    // a container's own limit, where it has one
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(max, used)| max.saturating_sub(used));
    Some(group.map_or(machine, |g| g.min(machine)))
}

/// An error that says what to lower, if `needed` bytes are more than there are.
pub fn check(needed: usize) -> anyhow::Result<()> {
    match available() {
        Some(free) if needed as u64 > free => anyhow::bail!(
            "training needs about {:.1} GB of memory and {:.1} GB are free; lower train.batch, model.width, \
             model.slots, data.buckets or data.max_size (`birkhoff inspect` shows what takes how much)",
            needed as f64 / 1e9,
            free as f64 / 1e9
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_fit_is_refused_and_what_is_small_is_not() {
        assert!(check(1 << 20).is_ok());
        if available().is_some() {
            let e = check(usize::MAX / 2).unwrap_err().to_string();
            assert!(e.contains("train.batch") && !e.contains('\n'), "{e}");
        }
    }
}
