//! What proves that dray keeps its promises: a reference model of a file system, generated
//! sequences of operations that run alike against the model and anything that serves
//! files, directed tests of every promise of the central traits, a simulator of a whole
//! site with everything going wrong, and fixtures.
//!
//! Apart from the simulator, which puts a site together, this crate must not know how the things
//! that it tests are made. It sees a `FileSystem`, or a directory. Test code everywhere may depend
//! on it; nothing that ships does.

pub mod conformance;
pub mod fixture;
pub mod heap;
pub mod model;
pub mod simulator;
pub mod step;
