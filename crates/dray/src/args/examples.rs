//! Examples at the end of the help and the man pages of subcommands.

pub const SERVE: &str = "Examples:
  # one directory, for this machine only
  dray serve --export home=/srv/home

  # two directories, for a network, to clients that know the key
  dray key
  dray serve --export home=/srv/home,allow=10.0.0.0/8 --export sw=/opt/sw,ro \\
      --listen tcp://0.0.0.0

  # a router: an export of another server, for the clients of another network
  dray serve --export home=dray://io1/home --listen tcp://10.2.0.1

  # as the comments in that file explain
  dray serve --config /etc/dray/dray.toml";

pub const MOUNT: &str = "Examples:
  dray mount dray://node1/home /home
  dray mount dray://node1:7441/home /home -o ro,timeout=300
  dray mount 'dray+unix:///run/dray.sock?export=home' /home

  # in /etc/fstab
  dray://node1/home  /home  dray  _netdev,nofail,retry=60  0 0";

pub const KEY: &str = "Examples:
  dray key                                     # at the server, once, as root
  scp -p /etc/dray/key root@node7:/etc/dray/   # to each client

  # a key of an ordinary user
  dray key ~/dray.key
  dray mount dray://node1/home ~/home -o auth=psk:$HOME/dray.key";

pub const STATUS: &str = "Examples:
  dray status              # every server and mount of this machine
  dray status /home        # one mount
  dray status --json | jq .operations";

pub const EVICT: &str = "Examples:
  dray evict node7         # the sessions of a host
  dray evict 4711          # one session";

pub const DRAIN: &str = "Examples:
  dray drain               # the server of this machine
  dray drain io2           # asked at any machine with a server of the same projection
  dray drain io2 --undo";

pub const QUIESCE: &str = "Examples:
  dray quiesce scratch     # at any server; returns when nothing is under way
  dray quiesce scratch --undo";

pub const CACHE: &str = "Examples:
  dray cache attach -r /mnt/data/training        # fetch all of it now
  dray cache state /mnt/data/training/part-0 --json
  dray cache list --dir /var/cache/dray";

pub const ACCEPT: &str = "Examples:
  dray status              # says what is at the export's directory, and what was
  dray accept home";

pub const POLICY: &str = "Examples:
  dray policy check
  dray policy run old-scratch --scan --dry-run    # the first time
  dray policy run old-scratch";

pub const AUDIT: &str = "Examples:
  dray audit register home siem --kinds change --idle-max 7d
  dray audit follow home --name siem --json       # goes on where it was
  dray audit search home --user anna --path /projects/x --since 2d
  dray audit search home --denied
  dray audit follow dray://io1,io2/home --json    # of two servers, by time
  dray audit verify home";

pub const UPGRADE: &str = "Examples:
  dray upgrade /home
  dray upgrade --all";

pub const SURVEY: &str = "Examples:
  dray survey /srv/home                     # at the server: what its disks can do
  dray survey /home                         # at a client: a mount
  dray survey dray://node1/home --threads 1,8 --block 64K
  dray survey /home --metadata              # how creates, stats and unlinks scale";

pub const QOS_SET: &str = "Examples:
  # all jobs whose name begins with sim have 200 MiB a second in any case
  dray qos set sims 'match.job=sim*' reservation=200M

  # each user has the same share, and 1 GiB a second at most
  dray qos set users each=user limit=1G --keep

  # what the file system below gives, where that is known
  dray qos set home match.export=home limit=2G";
