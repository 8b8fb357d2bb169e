//! Options of other file systems' mounts and exports. Each has an answer that names what dray has in its place.

const ATTRIBUTES: &str = "attr_timeout=SECONDS under consistency=close-to-open says how long names and \
                          attributes are cached; without it each call asks the server";
const PATIENCE: &str = "calls wait for ever, and can be killed; timeout=SECONDS has them fail with \
                        EHOSTDOWN then";
const SIZES: &str = "reads and writes have up to 1 MiB each; max_io=SIZE makes both smaller";
const VERSIONS: &str = "client and server agree on the newest version that both speak";
const PLACE: &str = "the target says where the server is: dray://HOST:PORT/NAME";
const LOCKS: &str = "locks hold over all clients of an export, always";
const RIGHTS: &str = "ACLs and extended attributes are those of the file system at the server";
const IDS: &str = "numbers of users are the same at both ends; squash= of the export replaces some";
const PROOF: &str = "a key authenticates both ends: auth=psk:FILE";
const PAGES: &str = "consistency=strict, close-to-open or immutable says what the kernel caches";
const TRIES: &str = "retry=SECONDS tries for a while; x-systemd.automount mounts at the first use";

/// What there is in the place of a mount's option of NFS, CIFS, Lustre, sshfs or other FUSE mounts.
pub fn of_a_mount(key: &str) -> Option<&'static str> {
    Some(match key {
        "cto" | "nocto" => {
            "by default (consistency=strict) each call sees what others did before it; \
             consistency=close-to-open is what NFS has"
        }
        "ac" | "noac" | "actimeo" | "acregmin" | "acregmax" | "acdirmin" | "acdirmax"
        | "lookupcache" | "entry_timeout" | "negative_timeout" | "ac_attr_timeout"
        | "dcache_timeout" => ATTRIBUTES,
        "hard" | "soft" | "softerr" | "softreval" | "timeo" | "retrans" | "intr" | "nointr" => {
            PATIENCE
        }
        "bg" | "fg" => TRIES,
        "rsize" | "wsize" | "bsize" | "max_read" | "max_write" | "big_writes" | "readdirplus" => {
            SIZES
        }
        "nconnect" | "max_connect" => {
            "each of workers=N threads, of up to 4, has a connection of its own"
        }
        "vers" | "nfsvers" | "minorversion" => VERSIONS,
        "port" | "mountport" | "mounthost" | "addr" | "proto" | "mountproto" | "tcp" | "udp"
        | "rdma" => PLACE,
        "lock" | "nolock" | "local_lock" | "flock" | "noflock" | "localflock" | "nobrl" => LOCKS,
        "acl" | "noacl" | "user_xattr" | "nouser_xattr" | "xattr" | "noxattr" => RIGHTS,
        "uid" | "gid" | "umask" | "idmap" | "dir_mode" | "file_mode" => IDS,
        "sec" | "credentials" | "username" | "password" | "cred" => PROOF,
        "resvport" | "noresvport" => "a mount without a key uses a port below 1024, if it may",
        "cache" | "direct_io" | "kernel_cache" | "auto_cache" | "fsc" | "nofsc" => PAGES,
        "reconnect" => "a mount always reconnects by itself",
        _ => return None,
    })
}

/// What there is in the place of an option of exports(5).
pub fn of_an_export(key: &str) -> Option<&'static str> {
    Some(match key {
        "no_root_squash" => "squash=none",
        "root_squash" => "squash=root, the default",
        "all_squash" => "squash=all",
        "no_all_squash" => "squash=root, the default, or squash=none",
        "sync" | "async" | "wdelay" | "no_wdelay" => {
            "data that a program has synced are always on media; leave it out"
        }
        "subtree_check" | "no_subtree_check" | "fsid" | "crossmnt" | "nohide" | "hide" => {
            "dray needs no such option; leave it out"
        }
        "sec" => "a key authenticates both ends: --auth psk:FILE, for the whole server",
        _ => return None,
    })
}
