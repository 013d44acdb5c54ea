//! Values that an independent program computed in float64 (`../shared/reference`, or the folder that
//! `BIRKHOFF_REFERENCE` names): every module, norm, ensemble, stream layer and whole model, with every
//! gradient, on the CPU executor in f64 and f32 and on the software Vulkan device.

mod cases;
mod fixtures;

use fixtures::{Fixtures, run_family};

macro_rules! family {
    ($test:ident, $file:literal) => {
        #[test]
        fn $test() {
            let Some(f) = Fixtures::open() else { return };
            run_family(&f, $file);
        }
    };
}

family!(reference_modules, "modules.safetensors");
family!(reference_norms, "norms.safetensors");
family!(reference_ensembles, "ensembles.safetensors");
family!(reference_streams, "streams.safetensors");
family!(reference_models, "models.safetensors");
family!(reference_models_final_norm_and_sum, "models_2.safetensors");
