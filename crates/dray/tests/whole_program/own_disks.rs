//! Mounts of a projection over three servers with a directory each. Needs root.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::common;
use crate::common::daemons::{signal, wait_for_daemon};
use crate::common::load::{KeptFiles, check_load, load};
use crate::common::{Rig, wait_for};
use serde_json::Value;

const LAYOUTS: [&str; 2] = ["layout = 'file'", "layout = 'stripe'\nstripe = '64K'"];

/// Three servers of one projection; the first is the home, and its rig mounts.
struct Site {
    servers: Vec<Rig>,
}

impl Site {
    fn new(layout: &str) -> Site {
        let mut site = Site { servers: (0..3).map(|_| Rig::new()).collect() };
        let names: Vec<String> = site
            .servers
            .iter()
            .map(|rig| format!("'unix://{}'", rig.path("socket").display()))
            .collect();
        (1..=3).for_each(|number| {
            let disk = site.disk(number);
            fs::create_dir(&disk).unwrap();
            fs::set_permissions(&disk, fs::Permissions::from_mode(0o777)).unwrap();
        });
        let text = format!(
            "[projection.scratch]\n{layout}\nservers = [{}]\npath = '{}/disk%n'\n\
             export = {{ squash = 'none' }}\n",
            names.join(", "),
            site.servers[0].path("").display()
        );
        fs::write(site.file(), text).unwrap();
        (0..3).for_each(|number| site.serve(number));
        site
    }

    /// Of the server with this number, from 1 on.
    fn disk(&self, number: usize) -> PathBuf {
        self.servers[0].path(&format!("disk{number}"))
    }

    fn file(&self) -> PathBuf {
        self.servers[0].path("projections.toml")
    }

    fn serve(&mut self, number: usize) {
        let file = self.file();
        self.servers[number].serve(&["--projections", file.to_str().unwrap()]);
    }

    fn mount(&mut self, name: &str) -> PathBuf {
        self.servers[0].mount_export("scratch", name, "")
    }

    fn is_connected(&self, at: &Path, number: usize) -> bool {
        let text = self.servers[0].demand(&["status", at.to_str().unwrap(), "--json"]);
        let status: Value = serde_json::from_str(&text).unwrap();
        status["projection"]["servers"][number]["connected"] == true
    }

    /// All objects at all targets, with their sizes.
    fn objects(&self) -> Vec<(PathBuf, u64)> {
        let mut found = Vec::new();
        for number in 1..=3 {
            let shards = fs::read_dir(self.disk(number).join("objects")).unwrap();
            let shards =
                shards.map(|shard| shard.unwrap().path()).filter(|path| !path.is_symlink());
            for shard in shards {
                for object in fs::read_dir(shard).unwrap() {
                    let path = object.unwrap().path();
                    let size = fs::metadata(&path).unwrap().len();
                    found.push((path, size));
                }
            }
        }
        found
    }
}

/// Neighbours differ, and so do blocks.
fn pattern(len_bytes: usize) -> Vec<u8> {
    (0..len_bytes).map(|at| (at % 251 + at / 65_536) as u8).collect()
}

// proves: P170, P171
#[test]
fn two_mounts_of_own_disks_agree_and_names_are_plain_files_at_the_home() {
    if common::skipped() {
        return;
    }
    for layout in LAYOUTS {
        let mut site = Site::new(layout);
        let (one, two) = (site.mount("one"), site.mount("two"));
        let content = pattern(1_000_000);
        fs::create_dir(one.join("d")).unwrap();
        fs::write(one.join("d/f"), &content).unwrap();
        assert_eq!(fs::read(two.join("d/f")).unwrap(), content);
        assert_eq!(fs::metadata(two.join("d/f")).unwrap().len(), 1_000_000);
        // Rename moves no data; the stub is a file at the home.
        let before = site.objects();
        fs::rename(two.join("d/f"), two.join("g")).unwrap();
        assert_eq!(site.objects(), before);
        assert!(site.disk(1).join("names/g").is_file());
        let largest = before.iter().map(|(_, size)| *size).max();
        assert_eq!(
            (before.len(), largest),
            (if layout.contains("file") { 1 } else { 3 }, Some(1_000_000))
        );
        // The size while others write, cut and append.
        let writer = OpenOptions::new().read(true).write(true).open(one.join("g")).unwrap();
        writer.write_all_at(b"behind", 2_000_000).unwrap();
        let size = || fs::metadata(two.join("g")).unwrap().len();
        assert_eq!(size(), 2_000_006);
        let mut hole = vec![1; 1000];
        let reader = File::open(two.join("g")).unwrap();
        reader.read_exact_at(&mut hole, 1_500_000).unwrap();
        assert_eq!(hole, [0; 1000]);
        writer.set_len(70_000).unwrap();
        assert_eq!(
            (size(), fs::read(two.join("g")).unwrap()),
            (70_000, content[..70_000].to_vec())
        );
        writer.set_len(200_000).unwrap();
        let read = fs::read(two.join("g")).unwrap();
        assert!(
            read[..70_000] == content[..70_000] && read[70_000..].iter().all(|byte| *byte == 0)
        );
        assert_eq!(read.len(), 200_000);
        appends_do_not_mix(&one.join("log"), &two.join("log"));
        // A file lives while it is open, and leaves nothing behind.
        for name in ["g", "log"] {
            fs::remove_file(two.join(name)).unwrap();
        }
        writer.write_all_at(b"still", 0).unwrap();
        assert_eq!(writer.metadata().unwrap().nlink(), 0);
        assert!(!site.objects().is_empty());
        drop((writer, reader));
        wait_for("the objects to be removed", || site.objects().is_empty());
        fs::remove_dir(one.join("d")).unwrap();
    }
}

fn appends_do_not_mix(one: &Path, two: &Path) {
    let writers = [(one, 'a'), (two, 'b'), (one, 'c')].map(|(path, letter)| {
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        std::thread::spawn(move || {
            use std::io::Write;
            let line = format!("{}\n", letter.to_string().repeat(999));
            (0..100).for_each(|_| file.write_all(line.as_bytes()).unwrap());
        })
    });
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let text = fs::read_to_string(one).unwrap();
    assert_eq!((text.len(), text.lines().count()), (300_000, 300));
    assert!(
        text.lines().all(|line| line.len() == 999 && line.bytes().all(|b| b == line.as_bytes()[0]))
    );
}

/// Servers and the daemon of the mount are killed under load; no application notices.
// proves: P173
#[test]
fn killed_servers_and_daemons_of_own_disks_lose_nothing() {
    if common::skipped() {
        return;
    }
    for layout in LAYOUTS {
        let mut site = Site::new(layout);
        let (at, other) = (site.mount("at"), site.mount("other"));
        let kept = KeptFiles::new(&at);
        let load = load(&at);
        for number in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(300));
            site.servers[number].end_server(libc::SIGKILL);
            site.serve(number);
            wait_for("the mount to come back to its server", || site.is_connected(&at, number));
            std::thread::sleep(std::time::Duration::from_millis(300));
            let daemon = wait_for_daemon(&at);
            signal(daemon, libc::SIGKILL);
            wait_for("another daemon", || wait_for_daemon(&at) != daemon);
        }
        let turns = load.end();
        check_load(&other, &turns);
        kept.check(&at);
    }
}

/// What is at a target that is away waits, and all else goes on.
// proves: P174
#[test]
fn a_target_that_is_away_keeps_its_own_files_waiting_alone() {
    if common::skipped() {
        return;
    }
    let mut site = Site::new(LAYOUTS[0]);
    let at = site.mount("at");
    let path = |number: usize| at.join(format!("f{number}"));
    (0..12).for_each(|number| fs::write(path(number), format!("{number}")).unwrap());
    let third = site.disk(3);
    let ids_at_third: Vec<String> = site
        .objects()
        .into_iter()
        .filter(|(object, _)| object.starts_with(&third))
        .map(|(object, _)| object.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert!(!ids_at_third.is_empty() && ids_at_third.len() < 12, "{ids_at_third:?}");
    site.servers[2].end_server(libc::SIGKILL);
    let names = fs::read_dir(&at).unwrap().count();
    assert_eq!(names, 12);
    let readers: Vec<_> = (0..12)
        .map(|number| {
            let path = path(number);
            std::thread::spawn(move || fs::read_to_string(path).unwrap())
        })
        .collect();
    wait_for("the files of the other targets", || {
        readers.iter().filter(|reader| reader.is_finished()).count() == 12 - ids_at_third.len()
    });
    site.serve(2);
    for (number, reader) in readers.into_iter().enumerate() {
        assert_eq!(reader.join().unwrap(), number.to_string());
    }
}

/// A check beside a server would take live files for damage, and two servers would spoil each other's.
// proves: P357
#[test]
fn disks_in_use_are_neither_checked_nor_served_twice() {
    if common::skipped() {
        return;
    }
    let mut site = Site::new(LAYOUTS[1]);
    let at = site.mount("at");
    fs::write(at.join("f"), pattern(300_000)).unwrap();
    let disks: Vec<String> = [1, 2, 3].map(|number| site.disk(number).display().to_string()).into();
    let to = site.servers[0].path("plain").display().to_string();
    let refused = |site: &Site, words: &[&str]| {
        let words: Vec<&str> =
            words.iter().copied().chain(disks.iter().map(String::as_str)).collect();
        let output = site.servers[0].run(&words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (!output.status.success(), said)
    };
    for words in [&["fsck"][..], &["fsck", "--repair"], &["reassemble", "--to", &to]] {
        let (failed, said) = refused(&site, words);
        assert!(failed && said.contains("is in use: stop the server unix://"), "{said}");
    }
    assert!(!Path::new(&to).exists());
    // One of three is enough.
    site.servers[0].end_server(libc::SIGTERM);
    site.servers[1].end_server(libc::SIGKILL);
    let name = format!("stop the server unix://{}", site.servers[2].path("socket").display());
    let (failed, said) = refused(&site, &["fsck", "--repair"]);
    assert!(failed && said.contains(&name), "{said}");
    // A lock ends with its process, so that a killed server comes back at once.
    site.serve(0);
    site.serve(1);
    site.servers[1].end_server(libc::SIGKILL);
    site.serve(1);
    assert_eq!(fs::read(at.join("f")).unwrap(), pattern(300_000));
}

/// The disks are whole without any server; damage is found, and mended without loss.
// proves: P175
#[test]
fn disks_are_checked_mended_and_made_plain_files_again_without_a_server() {
    if common::skipped() {
        return;
    }
    for layout in LAYOUTS {
        let mut site = Site::new(layout);
        let at = site.mount("at");
        let content = pattern(500_000);
        fs::create_dir(at.join("d")).unwrap();
        fs::write(at.join("d/f"), &content).unwrap();
        fs::set_permissions(at.join("d/f"), fs::Permissions::from_mode(0o640)).unwrap();
        fs::hard_link(at.join("d/f"), at.join("link")).unwrap();
        std::os::unix::fs::symlink("d/f", at.join("symlink")).unwrap();
        let sparse = File::create(at.join("sparse")).unwrap();
        sparse.write_all_at(b"end", 3_000_000).unwrap();
        drop(sparse);
        fs::write(at.join("doomed"), "x").unwrap();
        site.servers[0].umount(&at);
        (0..3).for_each(|number| _ = site.servers[number].end_server(libc::SIGTERM));
        let disks: Vec<String> =
            [3, 1, 2].map(|number| site.disk(number).display().to_string()).into();
        let run = |words: &[&str]| {
            let words: Vec<&str> =
                words.iter().copied().chain(disks.iter().map(String::as_str)).collect();
            let output = site.servers[0].run(&words);
            (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
        };
        assert!(run(&["fsck"]).0);
        // What a person did to the disks.
        fs::remove_file(site.disk(1).join("names/doomed")).unwrap();
        fs::write(site.disk(1).join("names/sparse"), "nobody sees this").unwrap();
        fs::write(site.disk(2).join("objects/00/note"), "").unwrap();
        let (sound, said) = run(&["fsck", "--json"]);
        let report: Value = serde_json::from_str(&said).unwrap();
        let found = kinds(&report).into_iter().filter(|kind| *kind != "hole").collect::<Vec<_>>();
        assert_eq!((sound, found), (false, vec!["not-empty", "orphan", "stray"]), "{said}");
        fs::remove_file(site.disk(2).join("objects/00/note")).unwrap();
        let (mended, said) = run(&["fsck", "--repair"]);
        assert!(mended && said.contains("moved to") && said.contains(": cut"), "{said}");
        assert!(run(&["fsck"]).0);
        let to = site.servers[0].path("plain");
        let (done, said) = run(&["reassemble", "--json", "--to", to.to_str().unwrap()]);
        let report: Value = serde_json::from_str(&said).unwrap();
        assert!(done && report["files"] == 2 && report["bytes"] == 3_500_003, "{said}");
        assert_eq!(fs::read(to.join("d/f")).unwrap(), content);
        let (file, link) =
            (fs::metadata(to.join("d/f")).unwrap(), fs::metadata(to.join("link")).unwrap());
        assert_eq!((file.ino(), file.nlink(), file.mode() & 0o7777), (link.ino(), 2, 0o640));
        assert_eq!(fs::read_link(to.join("symlink")).unwrap(), Path::new("d/f"));
        let sparse = fs::read(to.join("sparse")).unwrap();
        assert!(
            sparse[..3_000_000].iter().all(|byte| *byte == 0) && &sparse[3_000_000..] == b"end"
        );
        by_the_name_of_the_projection(&site, &content);
        // A disk is missing, or is there twice.
        let output = site.servers[0].run(&["fsck", &disks[0], &disks[1]]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("name the disks of") && !output.status.success(), "{said}");
    }
}

/// The kinds of findings, sorted.
fn kinds(report: &Value) -> Vec<&str> {
    let findings = report["findings"].as_array().unwrap();
    let mut kinds: Vec<&str> = findings.iter().map(|one| one["kind"].as_str().unwrap()).collect();
    kinds.sort_unstable();
    kinds
}

/// Lost objects and holes are distinguished as far as that can be done, and no tree with losses is made as if whole.
// proves: P358
#[test]
fn lost_misplaced_and_shared_objects_are_found() {
    if common::skipped() {
        return;
    }
    for layout in LAYOUTS {
        let mut site = Site::new(layout);
        let at = site.mount("at");
        let content = pattern(1_000_000);
        fs::write(at.join("damaged"), &content).unwrap();
        let damaged: Vec<PathBuf> = site.objects().into_iter().map(|(path, _)| path).collect();
        let sparse = File::create(at.join("sparse")).unwrap();
        sparse.write_all_at(b"end", 3_000_000).unwrap();
        drop(sparse);
        fs::write(at.join("whole"), &content).unwrap();
        File::create(at.join("empty")).unwrap();
        site.servers[0].umount(&at);
        (0..3).for_each(|number| _ = site.servers[number].end_server(libc::SIGTERM));
        let disks: Vec<String> =
            [1, 2, 3].map(|number| site.disk(number).display().to_string()).into();
        let run = |words: &[&str]| {
            let words = words.iter().copied().chain(disks.iter().map(String::as_str));
            let output = site.servers[0].run(&words.collect::<Vec<_>>());
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            (output.status.success(), report)
        };
        let is_striped = layout.contains("stripe");
        let holes = if is_striped { vec!["hole"] } else { vec![] };
        let (sound, report) = run(&["fsck", "--json"]);
        assert!(sound && kinds(&report) == holes, "{report}");
        // An object is lost, and nothing is repaired that is not there.
        let (lost, kept) = (&damaged[0], site.servers[0].path("kept"));
        fs::rename(lost, &kept).unwrap();
        let with = |kind| [holes.clone(), vec![kind]].concat();
        let (sound, report) = run(&["fsck", "--json", "--repair"]);
        assert_eq!((sound, kinds(&report)), (false, with("lacking")), "{report}");
        let text = report.to_string();
        assert!(text.contains("names/damaged"), "{text}");
        let to = site.servers[0].path("plain");
        let (done, report) = run(&["reassemble", "--json", "--to", to.to_str().unwrap()]);
        let incomplete = report["incomplete"].as_array().unwrap();
        assert!(!done && incomplete.len() == 1, "{report}");
        assert!(incomplete[0].as_str().unwrap().contains("names/damaged"), "{report}");
        assert_eq!(fs::read(to.join("whole")).unwrap(), content);
        fs::rename(&kept, lost).unwrap();
        // Two stubs with one id.
        let (stub, copy) = (site.disk(1).join("names/damaged"), site.disk(1).join("names/copy"));
        let copied = std::process::Command::new("cp").arg("-a").args([&stub, &copy]).status();
        assert!(copied.unwrap().success());
        let (sound, report) = run(&["fsck", "--json"]);
        assert_eq!((sound, kinds(&report)), (false, with("shared")), "{report}");
        fs::remove_file(&copy).unwrap();
        if !is_striped {
            // At a wrong disk. It goes out of the way, and the right one is lacking.
            let below = lost.strip_prefix(lost.ancestors().nth(3).unwrap()).unwrap();
            let wrong = (1..=3).map(|number| site.disk(number).join(below));
            let wrong = wrong.into_iter().find(|path| path != lost).unwrap();
            fs::rename(lost, &wrong).unwrap();
            let (sound, report) = run(&["fsck", "--json"]);
            assert_eq!((sound, kinds(&report)), (false, vec!["lacking", "misplaced"]), "{report}");
            fs::rename(&wrong, lost).unwrap();
        }
        let (sound, report) = run(&["fsck", "--json"]);
        assert!(sound && kinds(&report) == holes, "{report}");
    }
}

/// Nobody reads zeros from an empty disk, or from one of another tree, even if the server has forgotten its
/// former disk.
// proves: P359
#[test]
fn an_empty_disk_and_one_of_another_tree_are_not_mounted() {
    if common::skipped() {
        return;
    }
    let mut site = Site::new(LAYOUTS[1]);
    let at = site.mount("at");
    let content = pattern(300_000);
    fs::write(at.join("f"), &content).unwrap();
    let id_of =
        |site: &Site, number| fs::read_link(site.disk(number).join("objects/tree")).unwrap();
    let id = id_of(&site, 1);
    assert!((2..=3).all(|number| id_of(&site, number) == id));
    let kept = site.servers[0].path("kept");
    let swap = |site: &mut Site, change: &dyn Fn(&Site)| {
        site.servers[1].end_server(libc::SIGTERM);
        change(site);
        let state = site.servers[1].path("state");
        assert!(state.is_dir(), "the state directory is elsewhere");
        fs::remove_dir_all(state).unwrap();
        site.serve(1);
    };
    let refused = |site: &Site, words: &str| {
        let at = site.servers[0].path("refused");
        let _ = fs::create_dir(&at);
        let socket = site.servers[0].path("socket");
        let target = format!("dray+unix://{}?export=scratch", socket.display());
        let output = site.servers[0].run(&["mount", &target, at.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{said}");
    };
    swap(&mut site, &|site| {
        fs::rename(site.disk(2), &kept).unwrap();
        fs::create_dir(site.disk(2)).unwrap();
        fs::set_permissions(site.disk(2), fs::Permissions::from_mode(0o777)).unwrap();
    });
    // A mount that has used the former disk.
    let errors = [fs::read(at.join("f")).err(), fs::write(at.join("f"), "x").err()];
    assert_eq!(errors.map(|error| error?.raw_os_error()), [Some(libc::EIO); 2]);
    site.servers[0].umount(&at);
    refused(&site, "is empty, and the projection has used another one there");
    let other = site.disk(2).join("objects/tree");
    std::os::unix::fs::symlink("0".repeat(32), &other).unwrap();
    refused(&site, "belongs to another tree");
    swap(&mut site, &|site| {
        fs::remove_dir_all(site.disk(2)).unwrap();
        fs::rename(&kept, site.disk(2)).unwrap();
    });
    // A disk of a former version has no id, and gets it.
    fs::remove_file(site.disk(2).join("objects/tree")).unwrap();
    fs::remove_file(site.disk(1).join("objects/tree.2")).unwrap();
    let at = site.mount("again");
    assert_eq!(fs::read(at.join("f")).unwrap(), content);
    assert_eq!(id_of(&site, 2), id);
    assert!(site.disk(1).join("objects/tree.2").is_symlink());
}

fn by_the_name_of_the_projection(site: &Site, content: &[u8]) {
    let file = site.file().display().to_string();
    let run = |words: &[&str]| {
        let output = site.servers[0].run(words);
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    };
    let (code, said) = run(&["fsck", "scratch", "--projections", &file]);
    assert!(code == Some(0) && said.contains("projection scratch:"), "{said}");
    let to = site.servers[0].path("named");
    let words = ["reassemble", "scratch", to.to_str().unwrap(), "--projections", &file];
    assert_eq!(run(&words).0, Some(0));
    assert_eq!(fs::read(to.join("d/f")).unwrap(), content);
    let disks = [1, 2, 3].map(|number| site.disk(number).display().to_string());
    let [one, two, three] = disks.each_ref().map(String::as_str);
    for (words, message) in [
        (&["fsck", "scratch"][..], "scratch is no directory: name the directory of each server"),
        (&["fsck", "other", "--projections", &file], "it has no projection `other`, but scratch"),
        (&["fsck", one, two, "--projections", &file], "takes the name of one projection"),
        (&["reassemble", one, two, three], "say where the files go"),
        (&["reassemble", "scratch", "--projections", &file], "say where the files go"),
    ] {
        let (code, said) = run(words);
        assert!(code == Some(2) && said.contains(message), "{code:?} {said}");
    }
}
