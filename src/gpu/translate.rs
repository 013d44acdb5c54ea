//! A kernel written in the languages of Vulkan, Metal and DirectX, for tests.
//!
//! Nobody here has a Mac or a Windows host at hand, and naga finds some problems only while it writes.

use naga::back::{hlsl, msl, spv};
use naga::{Module, ShaderStage};

use super::error::{GpuError, error_chain};
use super::kernel::Kernel;
use super::reflect::{all_capabilities, parse};

/// One kernel in every language that wgpu uses natively.
#[derive(Clone, Debug)]
pub struct Translated {
    /// SPIR-V words (Vulkan).
    pub spirv: Vec<u32>,
    /// Metal Shading Language.
    pub msl: String,
    /// HLSL (DirectX 12).
    pub hlsl: String,
}

/// Translates a kernel with its constants applied.
pub fn translate(kernel: &Kernel) -> Result<Translated, GpuError> {
    let fail = |language: &str, message: String| {
        GpuError::shader(&kernel.label, format!("does not translate to {language}: {message}"))
    };
    let parsed = parse(kernel, all_capabilities())?;
    parsed.reflected.interface.check_contract(kernel)?;
    let module: &Module = &parsed.module;
    let info = &parsed.info;
    let entry = (ShaderStage::Compute, kernel.entry.to_string());

    // 1.3 is what Vulkan 1.1 takes, and the first with subgroup operations.
    let options = spv::Options { lang_version: (1, 3), ..Default::default() };
    let pipeline = spv::PipelineOptions { shader_stage: entry.0, entry_point: entry.1.clone() };
    let spirv = spv::write_vec(module, info, &options, Some(&pipeline))
        .map_err(|e| fail("SPIR-V", error_chain(&e)))?;

    // 2.1 (macOS 10.14) is the oldest that wgpu uses subgroups with.
    let options = msl::Options { lang_version: (2, 1), ..Default::default() };
    let pipeline = msl::PipelineOptions { entry_point: Some(entry.clone()), ..Default::default() };
    let (msl, written) =
        msl::write_string(module, info, &options, &pipeline).map_err(|e| fail("MSL", error_chain(&e)))?;
    // Entry points fail apart from the module, and a failed one is simply missing from the text.
    for name in written.entry_point_names {
        name.map_err(|e| fail("MSL", error_chain(&e)))?;
    }

    let shader_model =
        if parsed.reflected.uses_subgroups { hlsl::ShaderModel::V6_0 } else { hlsl::ShaderModel::V5_1 };
    let options = hlsl::Options { shader_model, ..Default::default() };
    let pipeline = hlsl::PipelineOptions { entry_point: Some(entry) };
    let mut text = String::new();
    let written = hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(module, info, None)
        .map_err(|e| fail("HLSL", error_chain(&e)))?;
    for name in written.entry_point_names {
        name.map_err(|e| fail("HLSL", error_chain(&e)))?;
    }
    Ok(Translated { spirv, msl, hlsl: text })
}
