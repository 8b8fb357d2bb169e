//! Removed files that were kept for clients of a slice which did not come back for them.

use std::collections::BTreeMap;
use std::time::Duration;

use dray_backends::backend::Backend;
use dray_layers::placement::{Placement, Slices};
use dray_rt::Instant;

use super::ProjectionSlices;

/// Since when this server has served each of its slices without a break, as far as it was asked.
#[derive(Default)]
pub struct ServedSince(BTreeMap<String, Instant>);

impl ServedSince {
    /// Removes from `fs` what was kept for clients of slices that are served here for `long`. By then each client
    /// has come back, or has been given up.
    pub fn forget_removed(&mut self, slices: &ProjectionSlices, fs: &dyn Backend, long: Duration) {
        let Some(running) = slices.running() else { return self.0.clear() };
        for (name, served) in &running.slices {
            match served.slice.is_primary() {
                true => _ = self.0.entry(name.clone()).or_insert_with(dray_rt::now),
                false => _ = self.0.remove(name),
            }
        }
        let definition = &slices.projection.definition;
        let mapping = Slices::of(Placement::new(definition));
        fs.forget_removed(&|id| {
            let slice = mapping.export_of(mapping.home(id), &definition.name);
            self.0.get(&slice).is_some_and(|since| since.elapsed() >= long)
        });
    }
}
