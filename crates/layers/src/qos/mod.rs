//! Shares of bandwidth: reservation, weight and limit of classes of calls (ADR 0048).
//!
//! [`Tree`] decides which call is next, and [`rules`] to which class a call belongs. [`Window`] says how much
//! may be under way below. [`QosGate`] asks them for a server, and keeps calls that wait.

mod bucket;
mod division;
#[cfg(test)]
mod fluid;
mod gate;
mod identity_cache;
mod meter;
mod report;
pub mod rules;
mod sharing;
mod state;
#[cfg(test)]
mod tests;
mod tree;
mod waiting;
mod window;

pub use bucket::Nanos;
pub use gate::QosGate;
pub use report::{ClassReport, QosReport};
pub use rules::{Pattern, QosRule, RuleKey, RuleSet};
pub use sharing::{ClassUsage, REPORT_MAX};
pub use tree::{CALL_COST_BYTES, Cost, NodeIndex, Rates, Tree};
pub use window::Window;
