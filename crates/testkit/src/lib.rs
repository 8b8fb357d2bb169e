//! The tests that prove that dray keeps its promises. There is a reference model of a file system.
//! Generated sequences of operations run alike against the model and anything that serves files.
//! Directed tests cover every promise of the central traits. A simulator runs a whole site with
//! everything going wrong. Fixtures complete these.
//!
//! Apart from the simulator, which puts a site together, this crate must not know how the things
//! that it tests are made. It sees a `FileSystem`, or a directory. Test code everywhere may depend
//! on it; nothing that ships does.

pub mod conformance;
pub mod etcd;
pub mod fixture;
pub mod heap;
pub mod model;
pub mod simulator;
pub mod step;
