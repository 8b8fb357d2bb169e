//! Servers of one directory whose file system has no handles: what one of them has not met it learns.

use crate::rig::*;
use dray_backends::posix::PosixOptions;
use dray_core::*;

fn of_a_server() -> PosixOptions {
    PosixOptions { id_key: Some(9), shared_ids: true, inode_idle_secs: 0, ..plain() }
}

fn is_unmet<T>(outcome: Result<T>) -> bool {
    let error = outcome.err().unwrap();
    assert_eq!(error.errno(), Errno::ESTALE);
    error.is_unmet()
}

// proves: P155
#[test]
fn an_id_is_the_same_everywhere_and_is_learned_from_a_name() {
    on_each(&[Kind::Ramfs], async |kit| {
        let [names, files] = [(); 2].map(|()| export(&kit.path, of_a_server()));
        let (cx, root) = (&kit.root_user, names.info().root);
        assert!(names.info().learns_ids() && !kit.fs.info().learns_ids());
        assert_eq!(root, files.info().root);
        let (ann, bob) = (user(1000, 1000, &[]), user(1001, 1001, &[]));
        let made = names.make(cx, root, name("d"), Make::Directory { mode: 0o777 });
        let dir = made.await.unwrap().id;
        let made = names.make(&ann, dir, name("closed"), Make::Directory { mode: 0o700 });
        let closed = made.await.unwrap().id;
        let (entry, _) = names.create(&ann, closed, name("f"), create_how(0o600)).await.unwrap();
        let id = entry.id;
        assert!(is_unmet(files.getattr(&ann, id).await));
        assert!(is_unmet(files.open(&ann, id, OpenHow::READ).await));
        assert!(is_unmet(files.learn(&ann, (closed, name("f")), id).await), "nor its directory");
        files.learn(&ann, (root, name("d")), dir).await.unwrap();
        files.learn(&ann, (dir, name("closed")), closed).await.unwrap();
        // A caller that says the name needs no right to search for it, and gets no other right by
        // it.
        files.learn(&bob, (closed, name("f")), id).await.unwrap();
        assert_eq!(files.getattr(&ann, id).await.unwrap().ino, entry.attr.ino);
        assert_eq!(errno(files.open(&bob, id, OpenHow::READ).await), Errno::EACCES);
        assert_eq!(errno(files.lookup(&bob, closed, name("f")).await), Errno::EACCES);
        assert_eq!(files.lookup(&ann, closed, name("f")).await.unwrap().id, id);
        // What the name does not lead to, and what nobody gave out, is not learned.
        assert!(!is_unmet(files.learn(cx, (root, name("d")), id).await));
        assert!(!is_unmet(files.learn(cx, (closed, name("g")), id).await));
        let made_up = FileId { generation: id.generation ^ 1, ..id };
        assert!(!is_unmet(files.learn(cx, (closed, name("f")), made_up).await));
        assert!(is_unmet(files.getattr(cx, made_up).await));
        let not_shared = kit.fs.learn(cx, (root, name("d")), dir).await;
        assert_eq!(errno(not_shared), Errno::ENOTSUP);
    });
}

// proves: P156
#[test]
fn what_another_server_moved_or_replaced_is_found_by_its_new_name() {
    on_each(&[Kind::Ramfs], async |kit| {
        let [names, files] = [(); 2].map(|()| export(&kit.path, of_a_server()));
        let (cx, root) = (&kit.root_user, names.info().root);
        let (entry, _) = names.create(cx, root, name("f"), create_how(0o600)).await.unwrap();
        let (id, how) = (entry.id, RenameHow::Replace);
        files.learn(cx, (root, name("f")), id).await.unwrap();
        let link = names.link(cx, id, root, name("link")).await.unwrap();
        assert_eq!(link.id, id);
        names.remove(cx, root, name("link"), RemoveKind::File).await.unwrap();
        names.rename(cx, (root, name("f")), (root, name("moved")), how).await.unwrap();
        files.trim();
        assert!(is_unmet(files.getattr(cx, id).await));
        assert!(!is_unmet(files.learn(cx, (root, name("f")), id).await));
        files.learn(cx, (root, name("moved")), id).await.unwrap();
        assert_eq!(files.getattr(cx, id).await.unwrap().ino, id.ino);
        let (other, _) = names.create(cx, root, name("f"), create_how(0o600)).await.unwrap();
        names.rename(cx, (root, name("f")), (root, name("moved")), how).await.unwrap();
        assert_eq!(files.lookup(cx, root, name("moved")).await.unwrap().id, other.id);
        assert!(!is_unmet(files.learn(cx, (root, name("moved")), id).await));
    });
}
