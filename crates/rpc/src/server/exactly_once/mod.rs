//! Why a change is carried out once: replay slots, intents that outlive the process, and one
//! change of a thing after the other.

pub(crate) mod bytes;
pub(crate) mod maker;
pub(crate) mod needs;
pub(crate) mod plan;
pub(crate) mod settle;
mod settle_rename;
pub(crate) mod slots;
