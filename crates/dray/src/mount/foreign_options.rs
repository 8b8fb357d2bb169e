//! Options of other file systems' mounts and exports. Each has an answer that names what dray has in its place.

const ATTRIBUTES: &str = "how long names and attributes are believed is attr_timeout=SECONDS under \
                          consistency=close-to-open; without that they are asked for each time";
const PATIENCE: &str = "calls wait for ever, and can be killed; timeout=SECONDS has them fail with \
                        EHOSTDOWN then";
const SIZES: &str = "reads and writes are up to 1 MiB each, which is not to be set";
const VERSIONS: &str = "client and server agree on the newest version that both speak";
const PLACE: &str = "the target says where the server is: dray://HOST:PORT/NAME";
const LOCKS: &str = "locks hold over all clients of an export, always";
const RIGHTS: &str = "ACLs and extended attributes are those of the file system at the server";
const IDS: &str = "numbers of users are the same at both ends; squash= of the export replaces some";
const PROOF: &str = "a key authenticates both ends: auth=psk:FILE";
const PAGES: &str = "what the kernel keeps is by consistency=strict, close-to-open or immutable";
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
        "resvport" | "noresvport" => {
            "a mount without a key comes from a port below 1024, where it may"
        }
        "cache" | "direct_io" | "kernel_cache" | "auto_cache" | "fsc" | "nofsc" => PAGES,
        "reconnect" => "a mount connects anew by itself, always",
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
            "what a program has synced is on media, always; leave it out"
        }
        "subtree_check" | "no_subtree_check" | "fsid" | "crossmnt" | "nohide" | "hide" => {
            "there is nothing to be set; leave it out"
        }
        "sec" => "a key authenticates both ends: --auth psk:FILE, for the whole server",
        _ => return None,
    })
}
