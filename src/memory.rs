//! How much memory this process may still take.

/// Bytes that this process may still take; `None` where the system does not say.
pub fn available() -> Option<u64> {
    let number = |file: &str| std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let machine = line_of("/proc/meminfo", "MemAvailable:").map(|kb| kb * 1024)?;
    // a container's own limit, where it has one
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(max, used)| max.saturating_sub(used));
    // what `ulimit -v` leaves
    let addresses = line_of("/proc/self/limits", "Max address space")
        .zip(line_of("/proc/self/status", "VmSize:"))
        .map(|(max, used)| max.saturating_sub(used * 1024));
    [group, addresses].into_iter().flatten().chain([machine]).min()
}

/// The first number of the line of a file that begins with `name`; `None` where it is no number, such as "unlimited".
fn line_of(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Less than this is not asked for ahead: what threads have reserved and do not use counts as taken.
const SMALL: usize = 64 << 20;

/// Whether so many more bytes cannot be had; then how many there are.
pub fn lacks(needed: usize) -> Option<u64> {
    if needed < SMALL {
        return None;
    }
    available().filter(|free| needed as u64 > *free)
}
