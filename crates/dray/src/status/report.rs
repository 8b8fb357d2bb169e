//! The reports of a server and of a mount, in JSON.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_cache::LocalCache;
use dray_client::{
    ChannelStats, ClientConnection, KeptWritesStatus, LeaseMemoryStatus, LossEvent, SessionStatus,
    UnsyncedStatus,
};
use dray_core::NodeId;
use dray_fuse::{Consistency, InFlight, JobTable, PassthroughStats, Reporter, Transport};
use dray_rpc::server::{ClientStatus, LeaseStatus, OutsideStatus, Server, ServerStatus};
use dray_rt::Instant;
use serde_json::{Value, json};

use crate::mount::mount_table::MountInfo;
use crate::mount::{aside_dir, flusher};
use crate::serve::export_state::{DirectoryState, ExportState};
use crate::serve::qos::{self, QosControl};
use crate::serve::slices::{self, SlicesByProjection};
use crate::status::left_over::LeftOver;
use crate::status::servers::servers;

/// What is said of a server beside what it says itself.
pub struct ServerReport {
    pub server: Server,
    pub exports: Vec<Arc<ExportState>>,
    pub slices: SlicesByProjection,
    pub qos: Arc<QosControl>,
    pub listen: Vec<String>,
    pub state: PathBuf,
    pub threads: usize,
    pub since: Instant,
}

/// What the cache on the local disk has done since the daemon began.
fn local_cache(cache: &LocalCache, passthrough: &PassthroughStats) -> Value {
    let counts = &cache.counts;
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    json!({
        "dir": cache.dir().display().to_string(),
        "limit_bytes": cache.size_bytes(),
        "hits": count(&counts.hits),
        "hit_bytes": count(&counts.hit_bytes),
        "misses": count(&counts.misses),
        "stored_bytes": count(&counts.stored_bytes),
        "unleased": count(&counts.unleased),
        "evicted_bytes": count(&counts.evicted_bytes),
        "errors": count(&counts.errors),
        "passthrough": {
            "agreed": passthrough.agreed,
            "files": passthrough.files,
            "opens": passthrough.opens,
            "refused": passthrough.refused.map(|errno| refusal(errno).to_string()),
            "left_behind": passthrough.left_behind,
        },
    })
}

/// Why the kernel does not read files of the cache by itself.
fn refusal(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}

fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e6
}

impl ServerReport {
    /// Of all exports, and of the slices that are served here.
    pub fn servers(&self) -> Vec<Server> {
        let slices = self.slices.values().flat_map(|slices| slices.servers());
        std::iter::once(self.server.clone()).chain(slices).collect()
    }

    /// Of all of them.
    pub fn status(&self) -> ServerStatus {
        let slices = self.slices.values().flat_map(|slices| slices.servers());
        slices.fold(self.server.status(), |all, server| all.and(server.status()))
    }

    async fn status_with_paths(&self) -> ServerStatus {
        let mut all = self.server.status_with_paths().await;
        let slices = self.slices.values().flat_map(|slices| slices.servers());
        let asked = slices.map(|server| async move { server.status_with_paths().await });
        for status in
            dray_rt::join_all(asked.map(|one| Box::pin(one) as dray_core::Fut<'_, _>).collect())
                .await
        {
            all = all.and(status);
        }
        all
    }

    /// The whole status.
    pub async fn json(&self) -> Value {
        let status = self.status_with_paths().await;
        json!({
            "kind": "server",
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uptime_s": seconds(self.since.elapsed()),
            "listen": self.listen,
            "state": self.state.display().to_string(),
            "threads": self.threads,
            "exports": self.exports.iter().map(|one| self.export(one, &status)).collect::<Vec<_>>(),
            "clients": clients(&status),
            "operations": self.operations(&status),
            "operations_left_out": status.operations_left_out,
            "buffers": {
                "used_bytes": status.buffer_used_bytes,
                "limit_bytes": status.buffer_limit_bytes,
            },
            "refused": {
                "files": status.refused.files,
                "locks": status.refused.locks,
                "clients": status.refused.clients,
                "connections": status.refused.connections,
            },
            "recovery": {
                "running": status.recovery.running,
                "redone_changes": status.recovery.redone_changes,
                "redone_bytes": status.recovery.redone_bytes,
                "losses": status.recovery.losses,
                "lost_bytes": status.recovery.lost_bytes,
                "clients_missing": status.recovery.clients_missing,
            },
        })
    }

    fn export(&self, export: &ExportState, status: &ServerStatus) -> Value {
        let below = status.exports.iter().find(|(name, _)| *name == export.name);
        let mapped_twice = status.mapped_twice.iter().find(|(name, _)| *name == export.name);
        let mapped_twice = mapped_twice.map_or(0, |(_, files)| *files);
        let leases = status.leases.iter().find(|(name, _)| *name == export.name);
        let outside = status.outside.iter().find(|(name, _)| *name == export.name);
        let ops: Value =
            serde_json::from_str(&export.metrics.snapshot().json()).unwrap_or(Value::Null);
        json!({
            "name": export.name,
            "dir": export.dir(),
            "below": below.map(|(_, kind)| kind),
            "read_only": export.read_only,
            "projection": export.projection.as_ref().map(|projection| {
                let definition = &projection.definition;
                json!({
                    "layout": definition.layout.to_string(),
                    "fingerprint": format!("{:016x}", definition.fingerprint()),
                    "server": definition.servers.get(projection.position),
                    "number": projection.position + 1,
                    "servers": definition.servers.len(),
                })
            }),
            "failover": self.slices.get(&export.name).map(|slices| slices.report()),
            "ops": ops,
            "mapped_twice": mapped_twice,
            "leases": leases.map(|(_, leases)| lease_counts(leases)),
            "outside": outside.map(|(_, counts)| outside_changes(counts, export.outside_unnoticed())),
            "aggregate": export.aggregate_counts().map(|counts| {
                let named = counts.named().map(|(name, count)| (name.to_owned(), json!(count)));
                Value::Object(named.collect())
            }),
            "audit": export.audit_status().map(|audit| json!({
                "records": audit.records,
                "bytes": audit.bytes,
                "next_index": audit.next_index,
                "segments": audit.segments,
                "log_bytes": audit.log_bytes,
                "dropped": audit.dropped,
                "held": audit.held,
                "blocked": audit.blocked,
                "consumers": audit.consumers,
                "lag": audit.lag,
                "trouble": audit.trouble,
            })),
            "qos": qos::shown(&export.qos.report()),
            "gone": export.directory_state() != DirectoryState::There,
            "moved": export.directory_state() == DirectoryState::Elsewhere,
            "starting": export.starting().map(|starting| json!({
                "since_s": seconds(starting.since),
                "error": starting.trouble,
                "held_back": starting.held.map(|held| json!({
                    "expected": held.expected,
                    "found": held.found,
                })),
            })),
            "servers_away": export.servers_away(),
            "hang": export.hang().map(|hang| json!({
                "since_s": seconds(hang.since),
                "calls": hang.calls,
            })),
        })
    }

    fn operations(&self, status: &ServerStatus) -> Vec<Value> {
        // There may be thousands of either.
        let clients: HashMap<u64, _> =
            status.clients.iter().map(|client| (client.session, client)).collect();
        let operation = |operation: &dray_rpc::server::OperationStatus| {
            let client = clients.get(&operation.session);
            let dir = client.and_then(|client| self.dir_of(&client.export));
            let whole = |path: &String| match (&dir, path.as_str()) {
                (Some(dir), "/") => dir.clone(),
                (Some(dir), path) if path.starts_with('/') => format!("{dir}{path}"),
                _ => path.clone(),
            };
            json!({
                "op": operation.op.name(),
                "path": operation.paths.iter().map(whole).collect::<Vec<_>>().join(" -> "),
                "session": format!("{:x}", operation.session),
                "host": client.map(|client| &client.host),
                "uid": operation.uid,
                "pid": operation.pid.0,
                "job": operation.job,
                "age_s": seconds(operation.age),
            })
        };
        status.operations.iter().map(operation).collect()
    }

    fn dir_of(&self, export: &str) -> Option<String> {
        let exported = self.exports.iter().find(|one| one.name == export)?;
        Some(exported.dir().trim_end_matches('/').to_owned())
    }

    /// The sessions that `who` means: a number as the status shows it, or a host name.
    pub fn sessions_of(&self, who: &str) -> Vec<u64> {
        let number = u64::from_str_radix(who, 16).ok();
        let means = |session: u64, host: &str| Some(session) == number || host == who;
        let clients = self.status().clients;
        let meant = clients.iter().filter(|client| means(client.session, &client.host));
        // A mount of a projection with failover has a session for each slice.
        let mounts: BTreeSet<_> = meant.clone().filter_map(mount_of).collect();
        let others = clients
            .iter()
            .filter(|client| mount_of(client).is_some_and(|mount| mounts.contains(&mount)));
        let all: BTreeSet<u64> = meant.chain(others).map(|client| client.session).collect();
        all.into_iter().collect()
    }
}

/// The mount of a projection with failover that a session is a part of, by its client and the projection.
fn mount_of(client: &ClientStatus) -> Option<(NodeId, &str)> {
    slices::projection_of(&client.export).map(|projection| (client.node, projection))
}

fn lease_counts(leases: &LeaseStatus) -> Value {
    json!({
        "held": leases.held,
        "written": leases.written,
        "locks": leases.locks,
        "recalls": leases.recalls,
        "acknowledged": leases.acknowledged,
        "expired": leases.expired,
        "fences": leases.fences,
    })
}

/// What became of changes outside dray, and why they are not noticed, if they are not.
fn outside_changes(counts: &OutsideStatus, unnoticed: Option<String>) -> Value {
    json!({
        "noticed": unnoticed.is_none(),
        "why_not": unnoticed,
        "changes": counts.changes,
        "missed": counts.missed,
    })
}

fn clients(status: &ServerStatus) -> Vec<Value> {
    let client = |client: &dray_rpc::server::ClientStatus| {
        json!({
            "session": format!("{:x}", client.session),
            "host": client.host,
            "peer": client.peer,
            "export": client.export,
            "connections": client.connections,
            "open_files": client.files,
            "calls": client.calls,
            "read_bytes": client.read_bytes,
            "written_bytes": client.written_bytes,
            "away_s": client.away.map(seconds),
            "leases": client.leases.as_ref().map(lease_counts),
        })
    };
    status.clients.iter().map(client).collect()
}

/// What is said of a mount.
pub struct MountReport {
    pub known: MountInfo,
    pub target: String,
    pub consistency: Consistency,
    pub timeout: Option<Duration>,
    pub cache: Option<Arc<LocalCache>>,
    pub session: ClientConnection,
    pub reporter: Reporter,
    pub since: Instant,
}

impl MountReport {
    /// Where it is now.
    pub fn mountpoint(&self) -> String {
        self.known.now_at().display().to_string()
    }

    /// Of each session that has begun, in the order of the projection's servers.
    pub fn sessions(&self) -> Vec<SessionStatus> {
        let begun = self.session.sessions().iter().filter(|session| session.has_begun());
        begun.map(|session| session.status()).collect()
    }

    /// What may not be on media at any server.
    pub fn unsynced(&self) -> UnsyncedStatus {
        UnsyncedStatus::sum(self.sessions().iter().map(|session| &session.unsynced))
    }

    /// The whole status.
    pub fn json(&self) -> Value {
        let mountpoint = self.mountpoint();
        let stats = self.reporter.stats();
        let sessions = self.sessions();
        let keeps_writes = sessions.iter().any(|session| session.kept_writes.is_some());
        let counts: serde_json::Map<String, Value> =
            stats.counts.iter().map(|(op, count)| ((*op).to_owned(), json!(count))).collect();
        let jobs = self.reporter.jobs();
        let operation = |one| operation(one, &jobs, &mountpoint);
        let operations: Vec<Value> = stats.in_flight.iter().map(operation).collect();
        json!({
            "kind": "mount",
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uptime_s": seconds(self.since.elapsed()),
            "mountpoint": mountpoint,
            "connection": self.known.connection,
            "target": self.target,
            "consistency": consistency_name(self.consistency),
            "timeout_s": self.timeout.map(seconds),
            "transport": transport_name(stats.transport),
            "transport_reason": stats.no_ring.map(|why| why.to_string()),
            "kernel": {
                "minor": stats.session.minor,
                "flags": stats.session.flag_names(),
            },
            "workers": stats.workers,
            "flusher": flusher::is_declared(),
            "memory_limit_bytes": flusher::group_limit_bytes(),
            "known_files": stats.nodes,
            "open_files": stats.handles,
            "server": server(&sessions),
            "left_over": LeftOver::of(self).map(|left| json!({
                "log_bytes": left.log_bytes,
                "aside_files": left.aside_files,
                "aside_bytes": left.aside_bytes,
            })),
            "aside_dir": keeps_writes.then(|| aside_dir(&self.known.at).display().to_string()),
            "projection": self.session.projection().map(|projection| json!({
                "name": projection.definition.name,
                "layout": projection.definition.layout.to_string(),
                "definition": format!("{:016x}", projection.definition.fingerprint()),
                "servers": servers(projection, &self.session),
            })),
            "process": { "copied_bytes": dray_core::copied_bytes() },
            "cache": self.cache.as_ref().map(|cache| local_cache(cache, &stats.passthrough)),
            "unsynced": unsynced(&UnsyncedStatus::sum(sessions.iter().map(|one| &one.unsynced))),
            "ops": counts,
            "read_bytes": stats.bytes.0,
            "written_bytes": stats.bytes.1,
            "operations": operations,
        })
    }
}

/// What is said of the sessions of a mount: of one, or of all servers of a projection together.
pub(super) fn server(sessions: &[SessionStatus]) -> Value {
    let of_channels = |count: fn(&ChannelStats) -> u64| {
        sessions.iter().flat_map(|session| &session.channels).map(count).sum::<u64>()
    };
    let is_up = |session: &SessionStatus| session.channels.iter().any(|channel| channel.up);
    let joined = |word: fn(&SessionStatus) -> String| {
        sessions.iter().map(word).collect::<Vec<_>>().join(",")
    };
    json!({
        "address": joined(|session| session.target.clone()),
        "session": joined(|session| format!("{:x}", session.session)),
        "connected": sessions.iter().all(is_up),
        "connections": of_channels(|channel| u64::from(channel.up)),
        "sessions_lost": sessions.iter().map(|session| session.lost).sum::<u64>(),
        "evicted": sessions.iter().any(|session| session.evicted),
        "redefined": sessions.iter().any(|session| session.redefined),
        "error": sessions.iter().find_map(|session| session.trouble.clone()),
        "calls": of_channels(|channel| channel.calls),
        "closes_one_way": of_channels(|channel| channel.one_way),
        "opened_at_lookup": {
            "made": sessions.iter().map(|session| session.open_ahead.made).sum::<u64>(),
            "used": sessions.iter().map(|session| session.open_ahead.used).sum::<u64>(),
            "given_up": sessions.iter().map(|session| session.open_ahead.given_up).sum::<u64>(),
        },
        "leases": remembered_leases(sessions),
        "kept_writes": kept_writes(sessions),
        "calls_resent": of_channels(|channel| channel.resent),
        "calls_in_flight": of_channels(|channel| channel.in_flight),
        "reconnections": of_channels(|channel| channel.connections.saturating_sub(1)),
    })
}

/// None if no session wants leases.
fn remembered_leases(sessions: &[SessionStatus]) -> Option<Value> {
    let leases: Vec<_> = sessions.iter().filter_map(|session| session.leases).collect();
    let sum = |field: fn(&LeaseMemoryStatus) -> u64| leases.iter().map(field).sum::<u64>();
    (!leases.is_empty()).then(|| {
        json!({
            "names": sum(|one| one.names),
            "attributes": sum(|one| one.attributes),
            "listings": sum(|one| one.listings),
            "listing_bytes": sum(|one| one.listing_bytes),
            "detail_bytes": sum(|one| one.detail_bytes),
            "hits": sum(|one| one.hits),
            "recalled": sum(|one| one.recalled),
        })
    })
}

/// What is kept under write leases. None if no session wants them.
fn kept_writes(sessions: &[SessionStatus]) -> Option<Value> {
    let kept: Vec<_> = sessions.iter().filter_map(|session| session.kept_writes).collect();
    let sum = |field: fn(&KeptWritesStatus) -> u64| kept.iter().map(field).sum::<u64>();
    (!kept.is_empty()).then(|| {
        json!({
            "files": sum(|one| one.files),
            "bytes": sum(|one| one.bytes),
            "writes": sum(|one| one.writes),
            "late": sum(|one| one.late),
            "lost": sum(|one| one.lost),
            "aside": sum(|one| one.aside),
            "disk_errors": kept.iter().filter_map(|one| one.disk_errors).reduce(|sum, more| sum + more),
        })
    })
}

fn operation(operation: &InFlight, jobs: &JobTable, mountpoint: &str) -> Value {
    let below = operation.path.as_ref().map(|path| String::from_utf8_lossy(path));
    let path = below.map(|below| match &*below {
        "/" => mountpoint.to_owned(),
        below => format!("{mountpoint}{below}"),
    });
    json!({
        "op": operation.op,
        "path": path.unwrap_or_else(|| format!("node {}", operation.node)),
        "uid": operation.uid.0,
        "pid": operation.pid.0,
        "job": jobs.get(&operation.pid),
        "age_s": seconds(operation.age),
    })
}

/// What may not be on media at the server, and what was lost with its power.
fn unsynced(status: &UnsyncedStatus) -> Value {
    let event = |event: &LossEvent| {
        json!({
            "age_s": seconds(event.age),
            "inode": event.file.map(|file| file.ino),
            "what": event.what,
            "bytes": event.bytes,
        })
    };
    json!({
        "limit_bytes": status.limit_bytes,
        "kept_bytes": status.kept_bytes,
        "memory_bytes": status.memory_bytes,
        "unkept_bytes": status.unkept_bytes,
        "files": status.files,
        "names": status.names,
        "recovering": status.recovering,
        "power_losses": status.power_losses,
        "sent_changes": status.sent_changes,
        "sent_bytes": status.sent_bytes,
        "losses": status.losses,
        "lost_bytes": status.lost_bytes,
        "events": status.events.iter().map(event).collect::<Vec<_>>(),
    })
}

/// As in `-o transport=`.
pub fn transport_name(transport: Transport) -> &'static str {
    match transport {
        Transport::Classic => "classic",
        Transport::Uring => "uring",
    }
}

/// As in `-o consistency=`.
pub fn consistency_name(consistency: Consistency) -> &'static str {
    match consistency {
        Consistency::Strict => "strict",
        Consistency::CloseToOpen => "close-to-open",
        Consistency::Immutable => "immutable",
    }
}
