//! Tests of the reflection: no device needed.

use std::borrow::Cow;

use super::*;
use crate::gpu::kernel::Bind;
use crate::gpu::translate::translate;

const SOURCE: &str = "
struct Params { n: u32, a: f32, pad0: u32, pad1: u32 }
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;
override TILE: u32 = 8u;
override WG: u32;
var<workgroup> shared_tile: array<f32, TILE * TILE>;

@compute @workgroup_size(WG, 2)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) l: u32) {
    shared_tile[l] = x[id.x].y;
    workgroupBarrier();
    if (id.x < p.n) { y[id.x] = shared_tile[l] * p.a; }
}

@compute @workgroup_size(64)
fn clear(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < p.n) { y[id.x] = 0.0; }
}
";

fn kernel() -> Kernel {
    Kernel {
        label: "demo".into(),
        source: Cow::Borrowed(SOURCE),
        entry: "main",
        constants: vec![("TILE", 16.0), ("WG", 32.0)],
        bindings: vec![Bind::In(0), Bind::Out(0)],
        params: vec![0; 16],
        groups: [1, 1, 1],
    }
}

#[test]
fn reads_bindings_sizes_and_overrides() {
    let r = reflect(&kernel()).unwrap();
    let seen: Vec<_> =
        r.interface.bindings.iter().map(|b| (b.index, b.name.as_str(), b.kind, b.min_size)).collect();
    assert_eq!(
        seen,
        [
            (0, "x", BindingKind::ReadOnly, 16),
            (1, "y", BindingKind::ReadWrite, 4),
            (2, "p", BindingKind::Uniform, 16),
        ]
    );
    assert_eq!(r.workgroup_size, [32, 2, 1]);
    assert_eq!(r.workgroup_bytes, 16 * 16 * 4);
    assert!(!r.uses_subgroups);
    check_default_limits("demo", &r).unwrap();
}

#[test]
fn an_entry_point_binds_only_what_it_uses() {
    let mut k = kernel();
    k.entry = "clear";
    // Overrides of other entry points may stay.
    k.constants.truncate(0);
    let r = reflect(&k).unwrap();
    assert_eq!(r.interface.bindings.iter().map(|b| b.index).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(r.workgroup_bytes, 0);
    assert_eq!(r.interface.declared, [0, 1, 2]);
}

#[test]
fn contract_violations_name_the_binding() {
    let text = |k: &Kernel| reflect(k).unwrap_err().to_string();
    let mut k = kernel();
    k.params.truncate(12);
    assert!(text(&k).contains("@binding(2) p has 16 bytes, params has 12"), "{}", text(&k));
    let mut k = kernel();
    k.bindings.push(Bind::Out(1));
    assert!(text(&k).contains("belongs at @binding(3)"), "{}", text(&k));
    let mut k = kernel();
    k.bindings.pop();
    assert!(text(&k).contains("@binding(1) y is a buffer"), "{}", text(&k));
}

#[test]
fn constants_must_exist_and_be_given() {
    let text = |k: &Kernel| reflect(k).unwrap_err().to_string();
    let mut k = kernel();
    k.constants.push(("TYPO", 1.0));
    assert!(text(&k).contains("kernel demo") && text(&k).contains("TYPO"), "{}", text(&k));
    let mut k = kernel();
    k.constants.truncate(1);
    assert!(text(&k).contains("WG"), "{}", text(&k));
}

#[test]
fn errors_name_kernel_and_line() {
    let mut k = kernel();
    k.source = SOURCE.replace("y[id.x] = 0.0;", "y[id.x] = nothing;").into();
    let text = reflect(&k).unwrap_err().to_string();
    assert!(text.starts_with("kernel demo: line 19:"), "{text}");
    assert!(text.contains("nothing") && !text.contains('\n'), "{text}");
    // A type error is found by validation, not by the parser; it needs a line as well.
    k.source = SOURCE.replace("y[id.x] = 0.0;", "y[id.x] = 1u;").into();
    let text = reflect(&k).unwrap_err().to_string();
    assert!(text.contains("line 19:") && !text.contains('\n'), "{text}");
}

#[test]
fn over_default_limits_is_found() {
    let mut k = kernel();
    k.constants = vec![("TILE", 16.0), ("WG", 256.0)];
    let r = reflect(&k).unwrap();
    let text = check_default_limits("demo", &r).unwrap_err().to_string();
    assert!(text.contains("512") && text.contains("maxComputeInvocationsPerWorkgroup"), "{text}");
    k.constants = vec![("TILE", 65.0), ("WG", 8.0)];
    let r = reflect(&k).unwrap();
    let text = check_default_limits("demo", &r).unwrap_err().to_string();
    assert!(text.contains("maxComputeWorkgroupStorageSize"), "{text}");
}

#[test]
fn translates_to_every_language() {
    let t = translate(&kernel()).unwrap();
    assert_eq!(t.spirv.first(), Some(&0x0723_0203));
    assert!(t.msl.contains("kernel void") && t.hlsl.contains("[numthreads(32, 2, 1)]"));
    assert!(!t.msl.contains("clear"), "only the kernel's entry point is written");
}

#[test]
fn subgroups_are_seen_and_translate() {
    let k = Kernel {
        source: "
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(32)
fn main(@builtin(global_invocation_id) id: vec3<u32>) { y[id.x] = subgroupAdd(y[id.x]); }
"
        .into(),
        constants: vec![],
        bindings: vec![Bind::Out(0)],
        params: vec![],
        ..kernel()
    };
    assert!(reflect(&k).unwrap().uses_subgroups);
    translate(&k).unwrap();
    // On a device without them the kernel is refused by name.
    let error = parse(&k, Capabilities::empty()).err().unwrap().to_string();
    assert!(error.contains("kernel demo") && error.to_lowercase().contains("subgroup"), "{error}");
}

/// What the page reads of the demo's shader with `from` replaced by `to`.
fn scanned(from: &str, to: &str) -> Result<Interface, GpuError> {
    assert!(SOURCE.contains(from));
    scan(&Kernel { source: SOURCE.replace(from, to).into(), ..kernel() })
}

#[test]
fn the_scanner_follows_calls_and_reads_no_members_or_comments() {
    let used = |i: &Interface| i.bindings.iter().map(|b| b.index).collect::<Vec<_>>();
    let inner = "{ return x[i].y; }\n@compute @workgroup_size(WG, 2)\nfn main";
    let text = SOURCE
        .replace("@compute @workgroup_size(WG, 2)\nfn main", &format!("fn taken(i: u32) -> f32 {inner}"))
        .replace("x[id.x].y;", "taken(id.x);");
    let k = Kernel { source: text.into(), ..kernel() };
    assert_eq!(used(&scan(&k).unwrap()), [0, 1, 2]);
    reflect(&k).unwrap();
    // `x` now stands in the comment and as a member only.
    let i = scanned("shared_tile[l] = x[id.x].y;", "shared_tile[l] = f32(id.x); // x[0]").unwrap();
    assert_eq!((used(&i), i.declared), (vec![1, 2], vec![0, 1, 2]));
}

#[test]
fn the_scanner_refuses_what_it_does_not_know() {
    let refusal = |from: &str, to: &str| scanned(from, to).unwrap_err().to_string();
    let text = refusal("@group(0) @binding(0)", "@group(1) @binding(0)");
    assert!(text.contains("kernel demo: variable x must be in @group(0)"), "{text}");
    let text = refusal("@binding(1)", "@binding(FIRST + 1)");
    assert!(text.contains("variable y must be in @group(0)"), "{text}");
    assert!(refusal("struct", "module").contains("`module` stands outside of everything"));
    assert!(refusal("var<uniform> p", "var<handle> p").contains("a variable in `handle`"));
    assert!(refusal("fn clear", "/* fn clear").contains("/* */"));
    assert!(refusal("fn main", "fn start").contains("no entry point main"));
    assert!(refusal("y[id.x] = 0.0; }\n}", "").contains("`{` is not closed"));
    assert!(
        refusal("var<workgroup> shared_tile: array<f32, TILE * TILE>;", "var<storage")
            .contains("a variable in")
    );
}

#[test]
fn a_scan_that_differs_from_the_shader_is_an_error() {
    let mut interface = reflect(&kernel()).unwrap().interface;
    check_scan(&kernel(), &interface).unwrap();
    interface.bindings[0].kind = BindingKind::ReadWrite;
    let text = check_scan(&kernel(), &interface).unwrap_err().to_string();
    assert!(text.contains("kernel demo: the page would bind"), "{text}");
}
