//! Which device a run uses: `--device auto|cpu|gpu|software|NAME`, and the list of what exists.
//!
//! `auto` never picks a software Vulkan driver: the CPU executor does the same work on the same cores
//! several times faster. Such a driver is for tests, and is used only where it is named.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::device::{Gpu, GpuOptions};
use super::error::GpuError;

/// What the user asked for with `--device`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A hardware GPU where there is one, else the CPU executor.
    #[default]
    Auto,
    /// The CPU executor.
    Cpu,
    /// A hardware GPU, or an error.
    Gpu,
    /// A software driver such as Mesa's llvmpipe, or an error.
    Software,
    /// An adapter by its number in `birkhoff devices`, or by a part of its name.
    Named(String),
}

impl FromStr for DeviceChoice {
    type Err = GpuError;

    fn from_str(text: &str) -> Result<Self, GpuError> {
        let text = text.trim();
        match text.to_ascii_lowercase().as_str() {
            "" => Err(GpuError::BadChoice { given: text.to_string() }),
            "auto" => Ok(DeviceChoice::Auto),
            "cpu" => Ok(DeviceChoice::Cpu),
            "gpu" => Ok(DeviceChoice::Gpu),
            "software" => Ok(DeviceChoice::Software),
            _ => Ok(DeviceChoice::Named(text.to_string())),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceChoice::Auto => "auto",
            DeviceChoice::Cpu => "cpu",
            DeviceChoice::Gpu => "gpu",
            DeviceChoice::Software => "software",
            DeviceChoice::Named(name) => name,
        })
    }
}

/// The device that [`select`] settled on.
#[derive(Clone, Debug)]
pub enum Selected {
    /// The CPU executor.
    Cpu,
    /// A wgpu device.
    Gpu(Gpu),
}

/// The limits that decide which models and kernels fit an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyLimits {
    /// Largest storage buffer that one binding can see, in bytes.
    pub max_storage_buffer_binding_size: u64,
    /// Largest buffer in bytes.
    pub max_buffer_size: u64,
    /// Invocations in one workgroup.
    pub max_compute_invocations_per_workgroup: u32,
    /// Workgroup memory in bytes.
    pub max_compute_workgroup_storage_size: u32,
    /// Storage buffers in one kernel.
    pub max_storage_buffers_per_shader_stage: u32,
    /// Workgroups in one dimension of a dispatch.
    pub max_compute_workgroups_per_dimension: u32,
}

/// One line of `birkhoff devices`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AdapterReport {
    /// Number that `--device` takes.
    pub index: usize,
    /// Adapter name.
    pub name: String,
    /// `vulkan`, `metal`, `dx12` or `browser`.
    pub backend: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub device_type: String,
    /// Driver name.
    pub driver: String,
    /// Driver version as the driver writes it.
    pub driver_info: String,
    /// PCI vendor id where there is one.
    pub vendor: u32,
    /// PCI device id where there is one.
    pub device: u32,
    /// Its place on the PCI bus, such as `0000:01:00.0`; empty where the driver does not tell.
    pub pci_bus: String,
    /// Sizes that matter to models and kernels.
    pub limits: KeyLimits,
    /// Per-kernel times on the device (`--profile`).
    pub timestamp_query: bool,
    /// Half precision in shaders.
    pub f16: bool,
    /// Subgroup operations in shaders.
    pub subgroups: bool,
    /// Whether `--device auto` would pick this adapter, in one process or the first rank of a host.
    pub auto: bool,
}

fn instance() -> wgpu::Instance {
    wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: wgpu::Backends::PRIMARY,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    })
}

async fn adapters() -> Vec<wgpu::Adapter> {
    let instance = instance();
    // A browser hands out one adapter, the one that fits the preference; `enumerate_adapters` would ask
    // without a preference and get the power-saving one on a laptop with two.
    #[cfg(target_arch = "wasm32")]
    {
        let options = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        instance.request_adapter(&options).await.into_iter().collect()
    }
    #[cfg(not(target_arch = "wasm32"))]
    instance.enumerate_adapters(wgpu::Backends::PRIMARY).await
}

/// How much `auto` and `gpu` want an adapter; `None` for software drivers, which they never take.
fn hardware_rank(info: &wgpu::AdapterInfo) -> Option<u32> {
    match info.device_type {
        wgpu::DeviceType::DiscreteGpu => Some(3),
        wgpu::DeviceType::IntegratedGpu => Some(2),
        wgpu::DeviceType::VirtualGpu => Some(1),
        // Browsers do not say what they run on unless it is a fallback adapter, which is `Cpu`.
        wgpu::DeviceType::Other => Some(0),
        wgpu::DeviceType::Cpu => None,
    }
}

/// Indices of the best adapters among `infos` by `rank`, as many as there are devices behind them: equals of one
/// backend, and none that another driver has shown already.
fn best(infos: &[wgpu::AdapterInfo], rank: impl Fn(&wgpu::AdapterInfo) -> Option<u32>) -> Vec<usize> {
    let mut best: Vec<usize> = vec![];
    for (i, info) in infos.iter().enumerate() {
        let Some(new) = rank(info) else { continue };
        let old = best.first().map(|first| &infos[*first]);
        match old.map(|old| (rank(old).cmp(&Some(new)), old.backend == info.backend)) {
            None | Some((Ordering::Less, _)) => best = vec![i],
            Some((Ordering::Equal, true)) if !best.iter().any(|b| same_device(&infos[*b], info)) => {
                best.push(i)
            }
            Some(_) => {}
        }
    }
    best
}

/// Whether two adapters are certainly one device: its drivers, if there are several, agree where on the bus it is.
fn same_device(a: &wgpu::AdapterInfo, b: &wgpu::AdapterInfo) -> bool {
    // that of DirectX 12 is looked up by the kind of card, of which there may be two
    let tells = |i: &wgpu::AdapterInfo| i.backend != wgpu::Backend::Dx12 && !i.device_pci_bus_id.is_empty();
    tells(a) && tells(b) && a.device_pci_bus_id == b.device_pci_bus_id
}

fn best_hardware(infos: &[wgpu::AdapterInfo]) -> Vec<usize> {
    best(infos, hardware_rank)
}

/// What `choice` means among `infos` for the process with this number on its host, whose device is a different one for
/// each as far as there are some: an index, or `None` for the CPU executor.
fn choose(
    choice: &DeviceChoice,
    number: usize,
    infos: &[wgpu::AdapterInfo],
) -> Result<Option<usize>, GpuError> {
    let turn = |found: Vec<usize>| (!found.is_empty()).then(|| found[number % found.len()]);
    let none = |hint: &str| GpuError::NoAdapter {
        wanted: choice.to_string(),
        found: found(infos),
        hint: hint.to_string(),
    };
    match choice {
        DeviceChoice::Cpu => Ok(None),
        DeviceChoice::Auto => Ok(turn(best_hardware(infos))),
        DeviceChoice::Gpu => turn(best_hardware(infos))
            .map(Some)
            .ok_or_else(|| none("install the GPU's Vulkan driver, or use --device auto (CPU) or software")),
        DeviceChoice::Software => {
            let software = best(infos, |i| (i.device_type == wgpu::DeviceType::Cpu).then_some(0));
            turn(software).map(Some).ok_or_else(|| {
                none("install a software Vulkan driver (Debian, Ubuntu: apt install mesa-vulkan-drivers)")
            })
        }
        DeviceChoice::Named(name) => {
            let digits = name.bytes().all(|b| b.is_ascii_digit());
            let index = name.parse::<usize>().ok().filter(|i| digits && *i < infos.len());
            // such a short one is a number, not the 1 of "LLVM 15"; 4090 may be a part of a name
            if index.is_some() || digits && name.len() <= 2 {
                let no = || {
                    none("no adapter has that number; give one of those that are there, or a part of a name")
                };
                return index.map(Some).ok_or_else(no);
            }
            let wanted = name.to_lowercase();
            infos
                .iter()
                .position(|i| i.name.to_lowercase().contains(&wanted))
                .map(Some)
                .ok_or_else(|| none("see `birkhoff devices` for names and numbers"))
        }
    }
}

fn found(infos: &[wgpu::AdapterInfo]) -> String {
    if infos.is_empty() {
        return "none".to_string();
    }
    let items: Vec<_> = infos
        .iter()
        .enumerate()
        .map(|(i, a)| format!("{i} = {} ({})", a.name, device_type_name(a.device_type)))
        .collect();
    items.join(", ")
}

/// Picks a device; see [`DeviceChoice`]. Fails rather than use something that was not asked for.
pub async fn select_async(choice: &DeviceChoice, options: &GpuOptions) -> Result<Selected, GpuError> {
    select_nth_async(choice, 0, options).await
}

/// [`select_async`] for one of several processes of a host, which share its devices: of those that are equally good
/// number N takes the N-th, and after the last one the first again. A device by its name or number is the same for all.
pub async fn select_nth_async(
    choice: &DeviceChoice,
    number: usize,
    options: &GpuOptions,
) -> Result<Selected, GpuError> {
    // Loading Vulkan takes tens of milliseconds and can print driver warnings: not for `cpu`.
    if *choice == DeviceChoice::Cpu {
        return Ok(Selected::Cpu);
    }
    let adapters = adapters().await;
    let infos: Vec<_> = adapters.iter().map(wgpu::Adapter::get_info).collect();
    let Some(index) = choose(choice, number, &infos)? else { return Ok(Selected::Cpu) };
    match Gpu::open(&adapters[index], options).await {
        Ok(gpu) => Ok(Selected::Gpu(gpu)),
        // `auto` promises a working device, so a GPU whose driver is broken is not fatal.
        Err(error) if *choice == DeviceChoice::Auto => {
            tracing::warn!("{error}; using the CPU executor");
            Ok(Selected::Cpu)
        }
        Err(error) => Err(error),
    }
}

/// [`select_async`] for hosts that can block.
#[cfg(not(target_arch = "wasm32"))]
pub fn select(choice: &DeviceChoice, options: &GpuOptions) -> Result<Selected, GpuError> {
    pollster::block_on(select_async(choice, options))
}

/// [`select_nth_async`] for hosts that can block.
#[cfg(not(target_arch = "wasm32"))]
pub fn select_nth(choice: &DeviceChoice, number: usize, options: &GpuOptions) -> Result<Selected, GpuError> {
    pollster::block_on(select_nth_async(choice, number, options))
}

/// Every adapter that wgpu sees, in the order of the numbers that `--device` takes.
pub async fn list_adapters_async() -> Vec<AdapterReport> {
    let adapters = adapters().await;
    let infos: Vec<_> = adapters.iter().map(wgpu::Adapter::get_info).collect();
    let auto = best_hardware(&infos).first().copied();
    adapters
        .iter()
        .zip(infos)
        .enumerate()
        .map(|(index, (adapter, info))| report(index, adapter, info, auto == Some(index)))
        .collect()
}

/// [`list_adapters_async`] for hosts that can block.
#[cfg(not(target_arch = "wasm32"))]
pub fn list_adapters() -> Vec<AdapterReport> {
    pollster::block_on(list_adapters_async())
}

fn report(index: usize, adapter: &wgpu::Adapter, info: wgpu::AdapterInfo, auto: bool) -> AdapterReport {
    let l = adapter.limits();
    let features = adapter.features();
    AdapterReport {
        index,
        name: info.name,
        backend: match info.backend {
            wgpu::Backend::BrowserWebGpu => "browser",
            wgpu::Backend::Vulkan => "vulkan",
            wgpu::Backend::Metal => "metal",
            wgpu::Backend::Dx12 => "dx12",
            wgpu::Backend::Gl => "gl",
            wgpu::Backend::Noop => "noop",
        }
        .to_string(),
        device_type: device_type_name(info.device_type).to_string(),
        driver: info.driver,
        driver_info: info.driver_info,
        vendor: info.vendor,
        device: info.device,
        pci_bus: info.device_pci_bus_id,
        limits: KeyLimits {
            max_storage_buffer_binding_size: l.max_storage_buffer_binding_size,
            max_buffer_size: l.max_buffer_size,
            max_compute_invocations_per_workgroup: l.max_compute_invocations_per_workgroup,
            max_compute_workgroup_storage_size: l.max_compute_workgroup_storage_size,
            max_storage_buffers_per_shader_stage: l.max_storage_buffers_per_shader_stage,
            max_compute_workgroups_per_dimension: l.max_compute_workgroups_per_dimension,
        },
        timestamp_query: features.contains(wgpu::Features::TIMESTAMP_QUERY),
        f16: features.contains(wgpu::Features::SHADER_F16),
        subgroups: features.contains(wgpu::Features::SUBGROUP),
        auto,
    }
}

/// The word that reports use for a device type.
pub fn device_type_name(device_type: wgpu::DeviceType) -> &'static str {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete",
        wgpu::DeviceType::IntegratedGpu => "integrated",
        wgpu::DeviceType::VirtualGpu => "virtual",
        wgpu::DeviceType::Cpu => "software",
        wgpu::DeviceType::Other => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str, device_type: wgpu::DeviceType) -> wgpu::AdapterInfo {
        wgpu::AdapterInfo {
            name: name.to_string(),
            ..wgpu::AdapterInfo::new(device_type, wgpu::Backend::Vulkan)
        }
    }

    #[test]
    fn choices_round_trip() {
        for text in ["auto", "cpu", "gpu", "software", "0", "GeForce"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert_eq!("AUTO".parse::<DeviceChoice>().unwrap(), DeviceChoice::Auto);
        assert!(" ".parse::<DeviceChoice>().is_err());
    }

    #[test]
    fn auto_prefers_discrete_and_never_software() {
        use wgpu::DeviceType::{Cpu, DiscreteGpu, IntegratedGpu, VirtualGpu};
        let all = [
            info("llvmpipe", Cpu),
            info("virtio", VirtualGpu),
            info("Iris", IntegratedGpu),
            info("GeForce", DiscreteGpu),
        ];
        let auto = DeviceChoice::Auto;
        assert_eq!(choose(&auto, 0, &all), Ok(Some(3)));
        assert_eq!(choose(&auto, 0, &all[..3]), Ok(Some(2)));
        assert_eq!(choose(&auto, 0, &all[..2]), Ok(Some(1)));
        assert_eq!(choose(&auto, 0, &all[..1]), Ok(None));
        assert_eq!(choose(&DeviceChoice::Software, 0, &all), Ok(Some(0)));
    }

    fn at(info: wgpu::AdapterInfo, bus: &str) -> wgpu::AdapterInfo {
        wgpu::AdapterInfo { device_pci_bus_id: bus.to_string(), ..info }
    }

    fn taken(choice: &DeviceChoice, infos: &[wgpu::AdapterInfo]) -> Vec<Option<usize>> {
        (0..4).map(|n| choose(choice, n, infos).unwrap()).collect()
    }

    #[test]
    fn ranks_of_a_host_share_the_best_devices() {
        use wgpu::DeviceType::{Cpu, DiscreteGpu, IntegratedGpu};
        let all = [
            info("llvmpipe", Cpu),
            at(info("A", DiscreteGpu), "0000:01:00.0"),
            info("Iris", IntegratedGpu),
            at(info("A", DiscreteGpu), "0000:02:00.0"),
            // another driver for the first
            at(info("A (second driver)", DiscreteGpu), "0000:01:00.0"),
            info("SwiftShader", Cpu),
        ];
        for choice in [DeviceChoice::Auto, DeviceChoice::Gpu] {
            assert_eq!(taken(&choice, &all), [Some(1), Some(3), Some(1), Some(3)]);
            assert_eq!(taken(&choice, &all[..3]), [Some(1); 4]);
        }
        assert_eq!(taken(&DeviceChoice::Software, &all), [Some(0), Some(5), Some(0), Some(5)]);
        assert_eq!(taken(&DeviceChoice::Named("A".into()), &all), [Some(1); 4]);
        assert_eq!(taken(&DeviceChoice::Named("3".into()), &all), [Some(3); 4]);
        assert_eq!(taken(&DeviceChoice::Cpu, &all), [None; 4]);
        assert_eq!(taken(&DeviceChoice::Auto, &all[..1]), [None; 4]);
        // drivers that do not tell where a device is: two cards of a kind are two
        let twins = [info("A", DiscreteGpu), info("A", DiscreteGpu)];
        assert_eq!(taken(&DeviceChoice::Auto, &twins), [Some(0), Some(1), Some(0), Some(1)]);
    }

    #[test]
    fn a_card_that_two_backends_show_is_one() {
        let dx12 = |name: &str| wgpu::AdapterInfo {
            backend: wgpu::Backend::Dx12,
            ..at(info(name, wgpu::DeviceType::DiscreteGpu), "0000:01:00.0")
        };
        let vulkan = |bus| at(info("A", wgpu::DeviceType::DiscreteGpu), bus);
        let all = [vulkan("0000:01:00.0"), vulkan("0000:02:00.0"), dx12("A"), dx12("A")];
        assert_eq!(taken(&DeviceChoice::Auto, &all), [Some(0), Some(1), Some(0), Some(1)]);
        // DirectX 12 gives both the first one's place
        assert_eq!(taken(&DeviceChoice::Auto, &all[2..]), [Some(0), Some(1), Some(0), Some(1)]);
    }

    #[test]
    fn names_numbers_and_errors() {
        let all = [
            info("llvmpipe (LLVM 15)", wgpu::DeviceType::Cpu),
            info("RTX 4090", wgpu::DeviceType::DiscreteGpu),
        ];
        let named = |n: &str| choose(&DeviceChoice::Named(n.to_string()), 0, &all);
        assert_eq!(named("LLVMpipe"), Ok(Some(0)));
        assert_eq!(named("0"), Ok(Some(0)));
        // a number out of range may still be a part of a name where it is long enough for one
        assert_eq!(named("4090"), Ok(Some(1)));
        for number in ["2", "15"] {
            let text = named(number).unwrap_err().to_string();
            assert!(text.contains("no adapter has that number"), "{text}");
        }
        let text = named("geforce").unwrap_err().to_string();
        assert!(text.contains("geforce") && text.contains("llvmpipe"), "{text}");
        let text = choose(&DeviceChoice::Gpu, 0, &all[..1]).unwrap_err().to_string();
        assert!(text.contains("0 = llvmpipe (LLVM 15) (software)"), "{text}");
        let text = choose(&DeviceChoice::Software, 0, &[]).unwrap_err().to_string();
        assert!(text.contains("found: none") && text.contains("mesa-vulkan-drivers"), "{text}");
    }
}
