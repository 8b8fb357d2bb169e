//! Stacks of dray that are compared with the model, and documents with the code.

mod aggregated;
mod documents;
mod failover;
mod file_systems;
mod model;
mod own_disks;
mod own_disks_model;
mod page_scripts;
mod placed;
mod placed_calls;
mod placed_learning;
mod placed_leases;
mod regressions;
mod same_bytes;
#[path = "../site/mod.rs"]
mod site;
mod stacked;
mod stacked_leases;
mod suite;
mod takeover;
mod takeover_leases;
