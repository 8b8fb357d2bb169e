//! An export: a directory that a server offers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{
    CallAdmission, Context, Fence, FileSystem, OnOutsideChanges, Result, Shares, UpperLeases,
};
use dray_fabric::{BufferPool, HEAD_MAX_BYTES, Peer};
use dray_rt::ExecutorHandle;

use crate::server::leases::{LeaseHolds, LeaseTable, OutsideChanges};
use crate::server::log_throttle::LogThrottle;
use crate::server::mappings::Mappings;
use crate::server::options::ServerOptions;
use crate::server::ranges::RangeTable;
use crate::server::recovery::Recovery;
use crate::server::recovery::grace::Grace;
use crate::server::recovery::group_sync::GroupSync;
use crate::server::recovery::replayed::ReplayedChanges;
use crate::server::recovery::window::RecoveryWindow;
use crate::server::refusals::Refusals;
use crate::server::replication::{LeaseFence, ServingLease};
use crate::server::tickets::Tickets;
use crate::server::watchers::Watchers;

/// The definition by which clients of a projection place files. It is made where projections are
/// configured; here it is a number and a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportDefinition {
    /// The fingerprint of the text; never 0, which stands for no definition.
    pub fingerprint: u64,
    /// The canonical form, at most [`ExportDefinition::TEXT_MAX_BYTES`].
    pub text: String,
}

impl ExportDefinition {
    /// Longest text; with the rest of a refusal it fits into the head of a frame.
    pub const TEXT_MAX_BYTES: usize = HEAD_MAX_BYTES / 2;
}

/// A file system under the name by which clients ask for it.
pub struct Export {
    /// The name.
    pub name: String,
    /// The file system that serves the export.
    pub fs: Arc<dyn FileSystem>,
    /// The addresses and users that may use the export; empty: everybody who gets to the port.
    pub allow: Vec<Allow>,
    /// Where the server has no key: whether ordinary users of clients may speak for anybody, too
    /// ([`Peer::is_privileged`]); `insecure` of exports(5).
    pub insecure: bool,
    /// Admits each call of a client before the call begins; none: all calls may begin.
    pub admission: Option<Arc<dyn CallAdmission>>,
    /// The file system that serves the export is no longer there. Nothing is answered any more, as
    /// if the server had died.
    pub(crate) lost: Arc<AtomicBool>,
    /// The same of what several exports are served from; one of them may be lost alone.
    pub(crate) below_lost: Option<Arc<AtomicBool>>,
    /// Without which nothing is answered either; none: it does not depend on one.
    pub(crate) lease: Option<Arc<LeaseFence>>,
    /// The instance of the export. A client that knows another instance has to reclaim its locks
    /// and files.
    pub(crate) instance: u64,
    /// Every caller is the same user there, and the server says so to clients.
    pub one_user: bool,
    /// Some callers are other users at the export than they say. Clients learn that.
    pub squashes: bool,
    /// What serves the export answers writes before it carries them out, and reports errors later.
    /// Clients learn that.
    pub writes_late: bool,
    /// The definition of the projection of which the export is a part. A client that places by
    /// another one is refused. None: it is no part of any.
    pub definition: Option<Arc<ExportDefinition>>,
    /// Clients get the definition here and nothing else: the files are those of other exports, the slices
    /// of the projection.
    pub definition_only: bool,
    /// Whether attributes and names are leased to clients that ask for it. What clients change in
    /// another way than by this server must not matter to them while a lease holds. Nothing is
    /// leased where writes are carried out late.
    pub leases: bool,
    /// Whether clients may keep what they write for a while, of files that nobody else looks at. `leases` has to be
    /// on, too.
    pub write_leases: bool,
    /// Whether a client may decide on the fcntl locks of files by itself, as long as no other one uses them. `leases` has to
    /// be on, too.
    pub lock_leases: bool,
    /// What servers above lease to the file system, if it is their client and leases that on. Then nothing else is
    /// leased, and no writes.
    pub upper_leases: Option<Arc<dyn UpperLeases>>,
    /// Whether the export has the names of a projection whose data are at other servers. Then it
    /// gives files ids of their data.
    pub gives_object_ids: bool,
    /// The ranges of the export's files that are in use, and the stamps of its changes.
    pub(crate) ranges: Arc<RangeTable>,
    pub(crate) recovery_window: RecoveryWindow,
    /// Memory for its data; its end of the server's pool, once it belongs to a server.
    pub(crate) pool: BufferPool,
    pub(crate) group_sync: GroupSync,
    pub(crate) replayed: ReplayedChanges,
    pub(crate) tickets: Tickets,
    pub(crate) watchers: Watchers,
    /// Hears of changes outside dray.
    pub(crate) outside: Arc<OutsideChanges>,
    /// None: nothing is leased.
    pub(crate) lease_table: Option<Arc<LeaseTable>>,
    /// A server before may have leased to clients that the journal does not know, since it was lost.
    pub(crate) leased_to_anybody: bool,
    /// What other servers of the projection are about to change.
    pub(crate) lease_holds: LeaseHolds,
    /// Clients of before that may have kept what they wrote. No call is carried out before it is written.
    pub(crate) kept_writes: Grace,
    pub(crate) mappings: Mappings,
    /// The clients that a start of the server waits for. Each export has its own, since the file
    /// system of another one may hang.
    pub(crate) grace: Grace,
    pub(crate) recovery: Recovery,
    /// The files that its clients have open, and the owners of their fcntl locks: no client can
    /// have all. Its locks are shared where they are kept.
    pub(crate) files: Arc<Shares>,
    pub(crate) lock_owners: Arc<Shares>,
    pub(crate) refused_files: Refusals,
    pub(crate) refused_locks: Refusals,
    /// Callers in too many groups.
    pub(crate) refused_callers: LogThrottle,
    /// The executor that took its last connection.
    pub(super) home: Mutex<Option<ExecutorHandle>>,
}

impl Export {
    /// Offers `fs` as `name`.
    pub fn new(name: &str, fs: Arc<dyn FileSystem>, allow: Vec<Allow>) -> Export {
        Export {
            tickets: Tickets::without_key(fs.info().uuid), // its server has one

            name: name.to_owned(),
            fs,
            allow,
            insecure: false,
            admission: None,
            lost: Arc::default(),
            below_lost: None,
            lease: None,
            instance: 0, // its server gives it one
            one_user: false,
            squashes: false,
            writes_late: false,
            definition: None,
            definition_only: false,
            leases: false,
            outside: Arc::default(),
            write_leases: false,
            lock_leases: false,
            upper_leases: None,
            lease_table: None,
            leased_to_anybody: false,
            lease_holds: LeaseHolds::default(),
            gives_object_ids: false,
            ranges: Arc::default(),
            recovery_window: RecoveryWindow::default(),
            group_sync: GroupSync::default(),
            replayed: ReplayedChanges::default(),
            watchers: Watchers::default(),
            kept_writes: Grace::default(),
            mappings: Mappings::default(),
            pool: BufferPool::new(0, 0),
            grace: Grace::default(),
            recovery: Recovery::default(),
            files: Arc::new(Shares::new(0)),
            lock_owners: Arc::new(Shares::new(0)),
            refused_files: Refusals::default(),
            refused_locks: Refusals::default(),
            refused_callers: LogThrottle::default(),
            home: Mutex::default(),
        }
    }

    /// With as much of what is counted as a server of these options has for an export.
    pub(super) fn within(self, options: &ServerOptions) -> Export {
        let held = self.definition.is_some().then_some(options.hold_time);
        // Beside other servers a change is not seen by the one that leases.
        let alone = self.definition.is_none() && self.upper_leases.is_none();
        let writes = self.write_leases && alone;
        // Another server could take the export over, and knows nothing of these.
        let locks = self.lock_leases && alone && self.lease.is_none();
        // A client believes in a lease for no longer than in its session.
        let locks = locks && options.lease >= options.lease_term + options.lease_term / 10;
        let upper = self.upper_leases.clone();
        let table = || {
            let table = LeaseTable::new(options, writes)
                .with_locks(options, locks)
                .of_several_servers(held);
            Arc::new(table.with_upper(upper, options))
        };
        Export {
            lease_table: self.may_lease().then(table),
            files: Arc::new(Shares::new(options.open_files_max)),
            lock_owners: Arc::new(Shares::new(options.lock_owners_max)),
            ..self
        }
    }

    /// The same for a watcher that sees the file system die. It sets `lost` before a call that
    /// failed because of that returns: such an error is then no answer.
    pub fn that_may_be_lost(self, lost: Arc<AtomicBool>) -> Export {
        Export { lost, ..self }
    }

    /// The same for one of several exports over that file system. The others go on when this one is
    /// withdrawn.
    pub fn over_what_may_be_lost(self, lost: Arc<AtomicBool>) -> Export {
        Export { below_lost: Some(lost), ..self }
    }

    /// The same, for a server that may be succeeded by another one once its `lease` has ended.
    pub fn that_is_leased(self, lease: Arc<ServingLease>) -> Export {
        Export { lease: Some(Arc::new(LeaseFence::now(lease))), ..self }
    }

    /// Whether anything of it is ever leased.
    pub fn may_lease(&self) -> bool {
        // Other servers' changes may be seen late there.
        let learns = self.definition.is_some() && self.fs.info().learns_ids();
        self.leases && !self.writes_late && !learns
    }

    /// Is to be notified of changes outside dray, so that leases end with them. They may come before the export is
    /// opened.
    pub fn on_outside_changes(&self) -> Arc<dyn OnOutsideChanges> {
        self.outside.clone()
    }

    /// Whether it has been withdrawn, or is about to be.
    pub(crate) fn is_lost(&self) -> bool {
        let lapsed = self.lease.as_ref().is_some_and(|lease| !lease.holds());
        let below = self.below_lost.as_ref().is_some_and(|lost| lost.load(Ordering::SeqCst));
        lapsed || below || self.lost.load(Ordering::SeqCst)
    }

    /// What calls of clients depend on. The backend looks at it, too, as the last thing before a change:
    /// its threads may have the change wait.
    pub(crate) fn fence(&self) -> Option<Arc<dyn Fence>> {
        self.lease.clone().map(|lease| -> Arc<dyn Fence> { lease })
    }

    /// Syncs everything, as [`GroupSync::sync_all`] does.
    pub(crate) async fn sync_all(&self, cx: &Context) -> Result<u64> {
        let awaited = self.replayed.awaited();
        self.group_sync.sync_all(cx, &*self.fs, &self.ranges, awaited).await
    }

    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    /// An executor that serves this export and no other; none before its first connection.
    pub(crate) fn home(&self) -> Option<ExecutorHandle> {
        self.home.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The running executor serves it.
    pub(crate) fn is_served_here(&self) {
        *self.home.lock().unwrap_or_else(PoisonError::into_inner) = Some(ExecutorHandle::current());
    }

    /// The fingerprint of the definition that its clients place by; 0: it has none.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.definition.as_ref().map_or(0, |definition| definition.fingerprint)
    }

    /// Whether clients at `peer` may use it. Processes of this machine, by Unix socket,
    /// may: the socket's own permissions decide about them.
    pub fn allows(&self, peer: Peer) -> bool {
        match peer {
            Peer::Local | Peer::User(..) => true,
            Peer::Ip(address) => {
                self.allow.is_empty() || self.allow.iter().any(|net| net.contains(address.ip()))
            }
        }
    }
}

/// A range of addresses: `10.1.0.0/16`, `fd00::/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allow {
    base: IpAddr,
    prefix_bits: u8,
}

impl Allow {
    /// Whether `text` is meant to be one, right or wrong.
    pub fn is_range(text: &str) -> bool {
        text.split('/').next().is_some_and(|base| base.parse::<IpAddr>().is_ok())
    }

    /// Whether `address` is in the range. IPv4 addresses in IPv6 form count as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.base, address.to_canonical()) {
            (IpAddr::V4(base), IpAddr::V4(address)) => {
                same_prefix(u32::from(base).into(), u32::from(address).into(), self.prefix_bits, 32)
            }
            (IpAddr::V6(base), IpAddr::V6(address)) => {
                same_prefix(u128::from(base), u128::from(address), self.prefix_bits, 128)
            }
            _ => false,
        }
    }
}

/// `address` without what stands behind the first `prefix_bits` bits.
fn network_of(address: IpAddr, prefix_bits: u8) -> IpAddr {
    let prefix_bits = u32::from(prefix_bits);
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - prefix_bits).unwrap_or(0);
            Ipv4Addr::from(u32::from(address) & mask).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - prefix_bits).unwrap_or(0);
            Ipv6Addr::from(u128::from(address) & mask).into()
        }
    }
}

/// The bits before an IPv4 address in IPv6 form, `::ffff:0:0` (RFC 4291, 2.5.5.2).
const MAPPED_BITS: u8 = 96;

fn same_prefix(left: u128, right: u128, prefix_bits: u8, width_bits: u32) -> bool {
    let ignored_bits = width_bits - u32::from(prefix_bits);
    (left ^ right).checked_shr(ignored_bits).unwrap_or(0) == 0
}

impl FromStr for Allow {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Allow, String> {
        let wrong = || format!("`{text}` is no address range, such as 10.1.0.0/16 or fd00::/8");
        let (base, bits) = match text.split_once('/') {
            Some((base, bits)) => (base, Some(bits)),
            None => (text, None),
        };
        let base: IpAddr = base.parse().map_err(|_| wrong())?;
        let width_bits = if base.is_ipv4() { 32 } else { 128 };
        let prefix_bits = match bits {
            Some(bits) => bits.parse().map_err(|_| wrong())?,
            None => width_bits,
        };
        if prefix_bits > width_bits {
            return Err(wrong());
        }
        let network = network_of(base, prefix_bits);
        if network != base {
            return Err(format!(
                "`{text}` is an address and no range: say {network}/{prefix_bits} for all of these, or \
                 {base} for that one"
            ));
        }
        // As addresses are looked at, too: in IPv6 form it would hold nobody.
        Ok(match base.to_canonical() {
            v4 @ IpAddr::V4(_) if base.is_ipv6() && prefix_bits >= MAPPED_BITS => {
                Allow { base: v4, prefix_bits: prefix_bits - MAPPED_BITS }
            }
            _ => Allow { base, prefix_bits },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_hold_what_they_should() {
        for (range, inside, outside) in [
            ("10.1.0.0/16", "10.1.255.3", "10.2.0.1"),
            ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
            ("fd00::/8", "fdff::1", "fe80::1"),
            ("10.0.0.0/8", "::ffff:10.9.9.9", "::1"),
            ("::ffff:10.0.0.0/104", "10.9.9.9", "11.0.0.1"),
            ("::ffff:10.0.0.1", "10.0.0.1", "10.0.0.2"),
            ("::ffff:0:0/96", "10.0.0.1", "::1"),
        ] {
            let range: Allow = range.parse().unwrap();
            assert!(range.contains(inside.parse().unwrap()));
            assert!(!range.contains(outside.parse().unwrap()));
        }
        assert!("0.0.0.0/0".parse::<Allow>().unwrap().contains("8.8.8.8".parse().unwrap()));
        for (text, network) in [
            ("10.1.1.1/8", "10.0.0.0/8"),
            ("10.0.0.1/0", "0.0.0.0/0"),
            ("fd00::1/8", "fd00::/8"),
            ("::ffff:10.1.1.1/104", "::ffff:10.0.0.0/104"),
        ] {
            let said = text.parse::<Allow>().unwrap_err();
            assert!(said.contains(&format!("say {network} for all")), "{said}");
            assert!(Allow::is_range(text));
        }
        assert!("10.1.1.1/32".parse::<Allow>().is_ok() && !Allow::is_range("ro"));
        for wrong in ["10.0.0.0/33", "x", "10.0.0/8", "::/129", "1.2.3.4/"] {
            assert!(wrong.parse::<Allow>().is_err(), "{wrong}");
        }
    }
}
