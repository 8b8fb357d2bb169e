//! Where the servers of a projection with failover agree on who is there and who serves what: etcd.
//!
//! [`EtcdMembership`] is the [`Membership`](dray_rpc::server::Membership) of one projection at one
//! server. Everything that speaks to etcd runs on a thread of its own with tokio's executor (`control`).
//! Calls of tasks cross to it by channels, and no thread of ours waits for it. docs/adr/0042-failover.md
//! has the reasons, and docs/OPERATIONS.md ("Failover") what an administrator sees.

mod calls;
mod connection;
mod control;
mod join;
mod keys;
mod membership;
mod records;
mod shared;
mod view;

pub use join::JoinRefusal;
pub use membership::{EtcdMembership, EtcdOptions};
pub use records::{MemberRecord, QuiesceRecord};
pub use view::ClusterView;
