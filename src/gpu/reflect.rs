//! What a shader says about itself: bindings, uniform size, workgroup size and memory, read by naga.
//!
//! A kernel that does not fit WebGPU's default limits is found without a device.

use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Module, ShaderStage, StorageAccess};

use super::error::{GpuError, error_chain};
use super::interface::{Binding, BindingKind, Interface, scan};
use super::kernel::Kernel;

/// The interface of one entry point with its constants applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reflected {
    /// Its bindings.
    pub interface: Interface,
    /// Invocations in x, y, z.
    pub workgroup_size: [u32; 3],
    /// Bytes of `var<workgroup>`, each variable rounded up to 16 as WebGPU counts.
    pub workgroup_bytes: u64,
    /// Needs subgroup operations, which browsers do not have through wgpu.
    pub uses_subgroups: bool,
}

/// A validated module with constants applied and only the kernel's entry point in it.
pub(crate) struct Parsed {
    pub module: Module,
    pub info: ModuleInfo,
    pub reflected: Reflected,
}

/// All that any adapter can do with a birkhoff kernel.
pub(crate) fn all_capabilities() -> Capabilities {
    Capabilities::SUBGROUP | Capabilities::SUBGROUP_BARRIER | Capabilities::SHADER_FLOAT16
}

/// What a device with `features` can do.
pub(crate) fn device_capabilities(features: wgpu::Features) -> Capabilities {
    let mut capabilities = Capabilities::empty();
    for (feature, capability) in [
        (wgpu::Features::SUBGROUP, Capabilities::SUBGROUP),
        (wgpu::Features::SUBGROUP_BARRIER, Capabilities::SUBGROUP_BARRIER),
        (wgpu::Features::SHADER_F16, Capabilities::SHADER_FLOAT16),
    ] {
        capabilities.set(capability, features.contains(feature));
    }
    capabilities
}

/// Parses and validates a kernel's shader and reads its interface. Needs no device.
///
/// Fails as well where the page, which has no naga, would read another interface.
pub fn reflect(kernel: &Kernel) -> Result<Reflected, GpuError> {
    let reflected = parse(kernel, all_capabilities())?.reflected;
    reflected.interface.check_contract(kernel)?;
    check_scan(kernel, &reflected.interface)?;
    Ok(reflected)
}

/// Checks that [`scan`] reads from a kernel's shader what naga reads.
pub(crate) fn check_scan(kernel: &Kernel, interface: &Interface) -> Result<(), GpuError> {
    let seen = |i: &Interface| {
        let of = |b: &Binding| (b.index, b.name.clone(), b.kind);
        (i.bindings.iter().map(of).collect::<Vec<_>>(), i.declared.clone())
    };
    let (scanned, parsed) = (seen(&scan(kernel)?), seen(interface));
    if scanned == parsed {
        return Ok(());
    }
    Err(GpuError::shader(
        &kernel.label,
        format!("the page would bind {scanned:?}, the shader has {parsed:?}"),
    ))
}

/// Parses, validates and specialises a kernel's shader.
pub(crate) fn parse(kernel: &Kernel, capabilities: Capabilities) -> Result<Parsed, GpuError> {
    let source = kernel.source.as_ref();
    let fail = |message: String| GpuError::shader(&kernel.label, message);

    let mut options = naga::front::wgsl::Options::new();
    options.capabilities = capabilities;
    let module = naga::front::wgsl::Frontend::new_with_options(options)
        .parse(source)
        .map_err(|e| fail(located(source, e.location(source), e.message())))?;
    let info = validate(&module, capabilities)
        .map_err(|e| fail(located(source, e.location(source), &error_chain(e.as_inner()))))?;

    let entry = module
        .entry_points
        .iter()
        .find(|e| e.name == kernel.entry && e.stage == ShaderStage::Compute)
        .ok_or_else(|| {
            let names: Vec<_> = module.entry_points.iter().map(|e| e.name.as_str()).collect();
            fail(format!("no compute entry point {}; the shader has {}", kernel.entry, names.join(", ")))
        })?;

    let mut declared: Vec<u32> = module
        .global_variables
        .iter()
        .filter_map(|(_, g)| g.binding.filter(|b| b.group == 0).map(|b| b.binding))
        .collect();
    declared.sort_unstable();
    declared.dedup();

    let constants = kernel.constants.iter().map(|(k, v)| (k.to_string(), *v)).collect();
    let stage = Some((ShaderStage::Compute, entry.name.as_str()));
    let (module, info) = naga::back::pipeline_constants::process_overrides(&module, &info, stage, &constants)
        .map_err(|e| fail(format!("pipeline constants: {}", error_chain(&e))))?;
    let (module, info) = (module.into_owned(), info.into_owned());

    let mut reflected = interface(kernel, &module, &info, declared)?;
    // Validating again is the one sure answer; the word is absent from nearly every shader.
    reflected.uses_subgroups =
        source.contains("subgroup") && validate(&module, capabilities - Capabilities::SUBGROUP).is_err();
    Ok(Parsed { module, info, reflected })
}

fn validate(
    module: &Module,
    capabilities: Capabilities,
) -> Result<ModuleInfo, Box<naga::WithSpan<naga::valid::ValidationError>>> {
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    validator.subgroup_stages(naga::valid::ShaderStages::COMPUTE);
    validator.subgroup_operations(naga::valid::SubgroupOperationSet::all());
    validator.validate(module).map_err(Box::new)
}

/// `line 12:5 "let x = y;": message`, so that generated source need not be dumped to understand it.
fn located(source: &str, location: Option<naga::SourceLocation>, message: &str) -> String {
    match location {
        Some(l) => {
            let text = source.lines().nth((l.line_number as usize).saturating_sub(1)).unwrap_or("");
            format!("line {}:{} `{}`: {message}", l.line_number, l.line_position, text.trim())
        }
        None => message.to_string(),
    }
}

fn interface(
    kernel: &Kernel,
    module: &Module,
    info: &ModuleInfo,
    declared: Vec<u32>,
) -> Result<Reflected, GpuError> {
    let fail = |message: String| GpuError::shader(&kernel.label, message);
    let (at, entry) = module
        .entry_points
        .iter()
        .enumerate()
        .find(|(_, e)| e.name == kernel.entry)
        .ok_or_else(|| fail(format!("no entry point {}", kernel.entry)))?;
    let uses = info.get_entry_point(at);

    let mut bindings = Vec::new();
    let mut workgroup_bytes = 0u64;
    for (handle, global) in module.global_variables.iter() {
        if uses[handle].is_empty() {
            continue;
        }
        let name = global.name.clone().unwrap_or_default();
        let size = u64::from(module.types[global.ty].inner.size(module.to_ctx()));
        let kind = match global.space {
            AddressSpace::WorkGroup => {
                workgroup_bytes += size.next_multiple_of(16);
                continue;
            }
            AddressSpace::Private | AddressSpace::Function => continue,
            AddressSpace::Uniform => BindingKind::Uniform,
            AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => {
                BindingKind::ReadWrite
            }
            AddressSpace::Storage { .. } => BindingKind::ReadOnly,
            _ => return Err(fail(format!("variable {name} is neither a buffer nor workgroup memory"))),
        };
        match global.binding {
            Some(b) if b.group == 0 => {
                bindings.push(Binding { index: b.binding, name, kind, min_size: size });
            }
            _ => return Err(fail(format!("variable {name} must be in @group(0)"))),
        }
    }
    bindings.sort_by_key(|b| b.index);
    Ok(Reflected {
        interface: Interface { bindings, declared },
        workgroup_size: entry.workgroup_size,
        workgroup_bytes,
        uses_subgroups: false,
    })
}

/// Checks that a shader fits `limits`.
pub fn check_limits(kernel: &str, reflected: &Reflected, limits: &wgpu::Limits) -> Result<(), GpuError> {
    let [x, y, z] = reflected.workgroup_size;
    let storage = reflected.interface.bindings.iter().filter(|b| b.kind != BindingKind::Uniform).count();
    let invocations = u64::from(x) * u64::from(y) * u64::from(z);
    let uniform = reflected
        .interface
        .bindings
        .iter()
        .filter(|b| b.kind == BindingKind::Uniform)
        .map(|b| b.min_size)
        .sum::<u64>();
    let checks = [
        (
            storage as u64,
            limits.max_storage_buffers_per_shader_stage.into(),
            "maxStorageBuffersPerShaderStage",
        ),
        (
            invocations,
            limits.max_compute_invocations_per_workgroup.into(),
            "maxComputeInvocationsPerWorkgroup",
        ),
        (x.into(), limits.max_compute_workgroup_size_x.into(), "maxComputeWorkgroupSizeX"),
        (y.into(), limits.max_compute_workgroup_size_y.into(), "maxComputeWorkgroupSizeY"),
        (z.into(), limits.max_compute_workgroup_size_z.into(), "maxComputeWorkgroupSizeZ"),
        (
            reflected.workgroup_bytes,
            limits.max_compute_workgroup_storage_size.into(),
            "maxComputeWorkgroupStorageSize",
        ),
        (uniform, limits.max_uniform_buffer_binding_size, "maxUniformBufferBindingSize"),
    ];
    for (needed, limit, limit_name) in checks {
        if needed > limit {
            return Err(GpuError::TooLarge {
                what: format!("kernel {kernel}"),
                needed,
                limit,
                limit_name,
                hint: "this kernel variant is not for this device".to_string(),
            });
        }
    }
    Ok(())
}

/// Checks that a shader runs within WebGPU's default limits, in any browser.
pub fn check_default_limits(kernel: &str, reflected: &Reflected) -> Result<(), GpuError> {
    check_limits(kernel, reflected, &wgpu::Limits::default())
}

#[cfg(test)]
#[path = "reflect_tests.rs"]
mod tests;
