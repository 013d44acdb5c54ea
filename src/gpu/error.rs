//! What can go wrong on a device, each as one line that a user can act on.

use crate::text::human_bytes;

/// A failure of the device layer.
///
/// Every message is a single line and names the tensor, kernel or step concerned, as the person who reads
/// it sees a training run, not wgpu calls.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GpuError {
    /// The text after `--device` is not understood.
    #[error(
        "--device {given:?} is not understood; use auto, cpu, gpu, software, an adapter's number or a part of its name"
    )]
    BadChoice {
        /// What was given.
        given: String,
    },
    /// No adapter fits the choice.
    #[error("no adapter fits --device {wanted} (found: {found}); {hint}")]
    NoAdapter {
        /// The choice as the user wrote it.
        wanted: String,
        /// The adapters that exist, or "none".
        found: String,
        /// What the user can do.
        hint: String,
    },
    /// The adapter exists but gives no device.
    #[error("adapter {adapter} gives no device: {message}")]
    NoDevice {
        /// Adapter name.
        adapter: String,
        /// wgpu's words.
        message: String,
    },
    /// The device has no room for a buffer.
    #[error("out of device memory for {what}{}; use a smaller batch or model, or --device cpu", of_bytes(*bytes))]
    OutOfMemory {
        /// Tensor or buffer.
        what: String,
        /// Its size; 0 where it is the driver that ran out.
        bytes: u64,
    },
    /// This machine has no room for what a graph computes.
    #[error(
        "out of memory: the {what} needs {:.1} GB, more than are free; lower train.batch, train.eval_batch, train.diagnose_rows \
         or model.width", *bytes as f64 / 1e9
    )]
    NoMemory {
        /// The graph.
        what: String,
        /// Its values.
        bytes: u64,
    },
    /// A buffer or a launch exceeds what the device can ever do.
    #[error("{what} needs {needed}, over this device's {limit_name} of {limit}; {hint}")]
    TooLarge {
        /// Tensor, buffer or kernel.
        what: String,
        /// Amount needed, in the limit's unit.
        needed: u64,
        /// The device's limit.
        limit: u64,
        /// The limit's WebGPU name.
        limit_name: &'static str,
        /// What the user can do.
        hint: String,
    },
    /// The device is gone: driver reset, unplugged, or destroyed.
    #[error("device lost while {doing}: {reason}; restart from the last checkpoint")]
    DeviceLost {
        /// The driver's words.
        reason: String,
        /// What was going on when it was noticed.
        doing: String,
    },
    /// wgpu refused a call: a bug in birkhoff or in the driver.
    #[error("the device refused an operation while {doing}: {message}")]
    Validation {
        /// What was going on.
        doing: String,
        /// wgpu's words on one line.
        message: String,
    },
    /// A shader does not parse, validate, translate or compile.
    #[error("kernel {kernel}: {message}")]
    Shader {
        /// Kernel label.
        kernel: String,
        /// Line, column, the line's text and naga's message.
        message: String,
    },
    /// A launch contradicts its shader: wrong bindings, sizes, or the same buffer twice.
    #[error("kernel {kernel}: {message}")]
    Launch {
        /// Kernel label.
        kernel: String,
        /// What is wrong, with binding numbers.
        message: String,
    },
    /// Work of the host between dispatches: communication between ranks.
    #[error("{0}")]
    Host(String),
    /// A read or write outside a buffer, or one that failed.
    #[error("{what}: {message}")]
    Transfer {
        /// Buffer label.
        what: String,
        /// What is wrong.
        message: String,
    },
}

impl GpuError {
    /// A [`GpuError::Launch`] for `kernel`.
    pub(crate) fn launch(kernel: &str, message: impl Into<String>) -> Self {
        GpuError::Launch { kernel: kernel.to_string(), message: message.into() }
    }

    /// A [`GpuError::Shader`] for `kernel`.
    pub(crate) fn shader(kernel: &str, message: impl AsRef<str>) -> Self {
        GpuError::Shader { kernel: kernel.to_string(), message: one_line(message.as_ref()) }
    }
}

/// Joins wgpu's indented, many-line messages to one line, and drops their boilerplate.
pub(crate) fn one_line(text: &str) -> String {
    text.lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && *l != "Validation Error" && *l != "Caused by:")
        .collect::<Vec<_>>()
        .join(": ")
}

/// An error and its causes on one line; naga keeps the useful half in the causes.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Transparent wrappers repeat their cause word for word.
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    one_line(&text)
}

fn of_bytes(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(" ({})", human_bytes(bytes)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line() {
        let text = one_line("Validation Error\n\nCaused by:\n  In Device::create_buffer\n    too big\n");
        assert_eq!(text, "In Device::create_buffer: too big");
    }
}
