//! What a shader declares and what a kernel hands it, and a reader of the first that needs no parser of WGSL.
//!
//! Bind-group layouts are made from this, so that a layout is never written twice. Natively naga reads it
//! ([`super::reflect`]); a browser's own compiler knows WGSL, so the page carries [`scan`] in naga's place, a
//! twentieth of its size. Tests hold the two to the same answer for every kernel.

use std::collections::HashSet;

use super::error::GpuError;
use super::kernel::Kernel;

/// How a shader uses one binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BindingKind {
    /// `var<storage, read>`.
    ReadOnly,
    /// `var<storage, read_write>`.
    ReadWrite,
    /// `var<uniform>`.
    Uniform,
}

/// One binding that an entry point uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// `@binding(index)` in `@group(0)`.
    pub index: u32,
    /// The variable's name.
    pub name: String,
    /// Its kind.
    pub kind: BindingKind,
    /// Size of the type, where an array without a length counts one element: the least that may be bound.
    /// 0 where it is not known, and the device is left to check.
    pub min_size: u64,
}

/// The bindings of one entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Bindings that the entry point (or what it calls) uses, by index.
    pub bindings: Vec<Binding>,
    /// Indices that the module declares, used by this entry point or not.
    pub declared: Vec<u32>,
}

impl Interface {
    /// Checks that a kernel hands its shader what the shader declares.
    ///
    /// A buffer that the module declares and this entry point does not use is allowed, for entry points that
    /// share one list of bindings; it is then not bound.
    pub fn check_contract(&self, kernel: &Kernel) -> Result<(), GpuError> {
        let fail = |message: String| Err(GpuError::launch(&kernel.label, message));
        let buffers = kernel.bindings.len() as u32;
        let mut uniform = false;
        for b in &self.bindings {
            let at = format!("@binding({}) {}", b.index, b.name);
            match b.kind {
                BindingKind::Uniform if b.index != buffers => {
                    return fail(format!("{at} is the uniform block, which belongs at @binding({buffers})"));
                }
                BindingKind::Uniform => {
                    let given = kernel.params.len() as u64;
                    if given != b.min_size {
                        return fail(format!("{at} has {} bytes, params has {given}", b.min_size));
                    }
                    uniform = true;
                }
                _ if b.index >= buffers => {
                    return fail(format!("{at} is a buffer, but only {buffers} buffers are given"));
                }
                _ => {}
            }
        }
        if !uniform && !kernel.params.is_empty() {
            let given = kernel.params.len();
            return fail(format!("params has {given} bytes, but the shader uses no uniform block"));
        }
        match (0..buffers).find(|i| !self.declared.contains(i)) {
            Some(i) => fail(format!("buffer {i} has no @binding({i}) in the shader")),
            None => Ok(()),
        }
    }
}

/// Reads the bindings from a shader's text: its global variables, and the names that the entry point and what
/// it calls mention.
///
/// It knows the WGSL that birkhoff writes and refuses what it does not know. Sizes of types it cannot tell: the
/// uniform block is taken to be as long as the kernel's parameters (the browser's compiler refuses the pipeline
/// where the shader's is longer), and of buffers the browser checks the sizes itself.
pub fn scan(kernel: &Kernel) -> Result<Interface, GpuError> {
    let fail = |message: String| GpuError::shader(&kernel.label, message);
    let module = Module::of(&kernel.source).map_err(fail)?;
    let mut bindings: Vec<Binding> = Vec::new();
    let (mut seen, mut reached) = (HashSet::from([kernel.entry]), vec![kernel.entry]);
    if !module.functions.iter().any(|f| f.0 == kernel.entry) {
        return Err(fail(format!("no entry point {}", kernel.entry)));
    }
    while let Some(name) = reached.pop() {
        for (_, body) in module.functions.iter().filter(|f| f.0 == name) {
            for pair in body.windows(2).filter(|pair| pair[0] != ".") {
                if seen.insert(pair[1]) {
                    reached.push(pair[1]);
                }
            }
        }
    }
    for v in module.variables.iter().filter(|v| seen.contains(v.name)) {
        let min_size = if v.kind == BindingKind::Uniform { kernel.params.len() as u64 } else { 0 };
        bindings.push(Binding { index: v.index, name: v.name.to_string(), kind: v.kind, min_size });
    }
    bindings.sort_by_key(|b| b.index);
    let mut declared: Vec<u32> = module.variables.iter().map(|v| v.index).collect();
    declared.sort_unstable();
    declared.dedup();
    Ok(Interface { bindings, declared })
}

struct Variable<'a> {
    name: &'a str,
    index: u32,
    kind: BindingKind,
}

/// The top level of a shader: buffers, and functions with the words of their bodies.
#[derive(Default)]
struct Module<'a> {
    variables: Vec<Variable<'a>>,
    functions: Vec<(&'a str, Vec<&'a str>)>,
}

impl<'a> Module<'a> {
    fn of(source: &'a str) -> Result<Self, String> {
        let words = words(source)?;
        let at = |i: usize| words.get(i).copied().unwrap_or("");
        let find = |from: usize, what: &str| {
            (from..words.len())
                .find(|&i| words[i] == what)
                .ok_or_else(|| format!("`{}` without `{what}`", at(from)))
        };
        // Where the bracket that opens at `from` closes.
        let close = |from: usize, open: &str, shut: &str| {
            let mut depth = 0;
            for (i, &word) in words.iter().enumerate().skip(from) {
                depth += i32::from(word == open) - i32::from(word == shut);
                if depth == 0 {
                    return Ok(i);
                }
            }
            Err(format!("`{open}` is not closed"))
        };
        let mut module = Module::default();
        let (mut i, mut group, mut binding) = (0, None, None);
        while i < words.len() {
            match words[i] {
                "@" => {
                    let name = at(i + 1);
                    let number =
                        (at(i + 2) == "(" && at(i + 4) == ")").then(|| at(i + 3).parse().ok()).flatten();
                    match name {
                        "group" => group = number,
                        "binding" => binding = number,
                        _ => {}
                    }
                    i = if at(i + 2) == "(" { close(i + 2, "(", ")")? + 1 } else { i + 2 };
                    continue;
                }
                "var" => {
                    let end = find(i, ";")?;
                    let kind = match (at(i + 2), at(i + 3), at(i + 4)) {
                        ("workgroup" | "private", ">", _) => None,
                        ("uniform", ">", _) => Some(BindingKind::Uniform),
                        ("storage", ">", _) => Some(BindingKind::ReadOnly),
                        ("storage", ",", "read") => Some(BindingKind::ReadOnly),
                        ("storage", ",", "read_write") => Some(BindingKind::ReadWrite),
                        (space, ..) => return Err(format!("a variable in `{space}`")),
                    };
                    if let Some(kind) = kind {
                        let name = at(find(i, ">")? + 1);
                        match (group, binding) {
                            (Some(0), Some(index)) => module.variables.push(Variable { name, index, kind }),
                            _ => return Err(format!("variable {name} must be in @group(0)")),
                        }
                    }
                    i = end + 1;
                }
                "fn" => {
                    let open = find(i, "{")?;
                    let end = close(open, "{", "}")?;
                    module.functions.push((at(i + 1), words[open..end].to_vec()));
                    i = end + 1;
                }
                "struct" => i = close(find(i, "{")?, "{", "}")? + 1,
                "const" | "override" | "alias" | "enable" | "requires" | "diagnostic" => {
                    i = find(i, ";")? + 1
                }
                ";" => i += 1,
                word => return Err(format!("`{word}` stands outside of everything")),
            }
            (group, binding) = (None, None);
        }
        Ok(module)
    }
}

/// Names, numbers and single signs, without comments.
fn words(source: &str) -> Result<Vec<&str>, String> {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut words = Vec::new();
    let mut rest = source.trim_start();
    while let Some(first) = rest.chars().next() {
        let end = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            return Err("a comment in /* */".to_string());
        } else if first.is_ascii_digit() {
            rest.find(|c| !part_of_word(c) && c != '.').unwrap_or(rest.len())
        } else if part_of_word(first) {
            rest.find(|c| !part_of_word(c)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        if !rest.starts_with("//") {
            words.push(&rest[..end]);
        }
        rest = rest[end..].trim_start();
    }
    Ok(words)
}
