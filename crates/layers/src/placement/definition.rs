//! What a projection is: the same text at all its servers, and at each client from its mount on.

use std::fmt::{self, Write as _};

use dray_core::FsUuid;
use dray_core::fnv1a;

use super::cluster::ClusterOptions;

/// Which server has what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The servers share a file system. Each file has one server.
    Cluster,
    /// The servers share a file system. The blocks of each file are spread over some of them.
    ClusterStripe,
    /// Each server has its own disk. Each file is whole at one of them.
    File,
    /// Each server has its own disk. The blocks of each file are spread over some of them.
    Stripe,
    /// The servers share a file system, or have the same content, which nobody changes. Each client uses
    /// one server.
    LoadBalance,
}

impl Layout {
    /// All, with their names in definitions.
    pub(super) const NAMES: [(&'static str, Layout); 5] = [
        ("cluster", Layout::Cluster),
        ("cluster-stripe", Layout::ClusterStripe),
        ("file", Layout::File),
        ("stripe", Layout::Stripe),
        ("loadbalance", Layout::LoadBalance),
    ];

    /// Whether the blocks of a file are at several servers.
    pub fn is_striped(self) -> bool {
        matches!(self, Layout::ClusterStripe | Layout::Stripe)
    }

    /// Whether all servers have the same files.
    pub fn is_shared(self) -> bool {
        !matches!(self, Layout::File | Layout::Stripe)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&Layout::NAMES, self))
    }
}

/// How an inode number becomes the number that chooses a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashKind {
    /// A mix of 64 bits, the default.
    Rendezvous,
    /// Jenkins's one-at-a-time hash.
    Jenkins,
    /// FNV-1a of 64 bits.
    Fnv1a,
    /// The inode number modulo the number of servers. Adding a server moves nearly every file.
    Modulo,
}

impl HashKind {
    /// All, with their names in definitions.
    pub(super) const NAMES: [(&'static str, HashKind); 4] = [
        ("rendezvous", HashKind::Rendezvous),
        ("jenkins", HashKind::Jenkins),
        ("fnv-1a", HashKind::Fnv1a),
        ("modulo", HashKind::Modulo),
    ];
}

impl fmt::Display for HashKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&HashKind::NAMES, self))
    }
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: &T) -> &'static str {
    names.iter().find(|(_, one)| one == value).map_or("", |(name, _)| name)
}

/// The definition of a projection, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Definition {
    /// What clients ask for: `dray://HOST/NAME`.
    pub name: String,
    /// Which server has what.
    pub layout: Layout,
    /// The servers: `tcp://HOST:PORT` or `unix:///PATH`. Their names choose files, not their order.
    pub servers: Vec<String>,
    /// The directory that each server serves.
    pub path: String,
    /// Servers that the blocks of one file are spread over; 1 where the layout does not stripe.
    pub width: usize,
    /// Size of a block, bytes: a power of two.
    pub stripe_bytes: u64,
    /// For files.
    pub data_hash: HashKind,
    /// For the names in a directory.
    pub meta_hash: HashKind,
    /// The names of one directory are spread over all servers.
    pub spread_creates: bool,
    /// No read or write is split over servers.
    pub atomic: bool,
    /// The share of a dead server goes to others.
    pub failover: bool,
    /// The servers lease names and attributes to clients that ask for it. Each client has servers hold what it is
    /// about to change at another one.
    pub leases: bool,
    /// The subtable `export`: options of the export for the servers. Clients do not get it, and it is no
    /// part of the fingerprint.
    pub export: toml::Table,
    /// How its servers find each other. Clients do not get it, and it is no part of the fingerprint. None
    /// without failover, and at clients.
    pub cluster: Option<ClusterOptions>,
}

impl Definition {
    /// The same definition as text, every value written out. Clients get this.
    pub fn canonical(&self) -> String {
        let quoted = |text: &str| toml::Value::from(text).to_string();
        let servers: Vec<String> = self.servers.iter().map(|server| quoted(server)).collect();
        let mut text = format!("[projection.{}]\n", quoted(&self.name));
        for (key, value) in [
            ("layout", quoted(&self.layout.to_string())),
            ("servers", format!("[{}]", servers.join(", "))),
            ("path", quoted(&self.path)),
            ("width", self.width.to_string()),
            ("stripe", self.stripe_bytes.to_string()),
            ("data_hash", quoted(&self.data_hash.to_string())),
            ("meta_hash", quoted(&self.meta_hash.to_string())),
            ("spread_creates", self.spread_creates.to_string()),
            ("atomic", self.atomic.to_string()),
        ] {
            let _ = writeln!(text, "{key} = {value}"); // a String takes all
        }
        // Definitions without it keep the fingerprints that they had before there was failover.
        if self.failover {
            text.push_str("failover = true\n");
        }
        if self.leases {
            text.push_str("leases = true\n");
        }
        text
    }

    /// The version that people see, and by which servers and clients know that they have the same
    /// definition. Never 0.
    pub fn fingerprint(&self) -> u64 {
        fnv1a(self.canonical().as_bytes()).max(1)
    }

    /// The identity of the projection's file system. It is the same at all servers, and stays when servers
    /// come and go.
    pub fn fs_uuid(&self) -> FsUuid {
        let half = |part: &str| {
            let kind = if self.layout.is_shared() { "shared" } else { "own" };
            u128::from(fnv1a(format!("dray projection {part} {kind} {}", self.name).as_bytes()))
        };
        FsUuid(half("upper") << 64 | half("lower"))
    }

    /// Which of the servers `server` is, a name as in the definition.
    pub fn position(&self, server: &str) -> Option<usize> {
        let server = super::parse::normal_server(server).ok()?;
        self.servers.iter().position(|one| *one == server)
    }
}
