"""Dumps of Slurm's database as clients of several versions write them, and what a hostile machine sends instead."""

from __future__ import annotations

OPEN = b"""\
/*!40101 SET @OLD_CHARACTER_SET_CLIENT=@@CHARACTER_SET_CLIENT */;
/*!40101 SET @OLD_CHARACTER_SET_RESULTS=@@CHARACTER_SET_RESULTS */;
/*!40101 SET @OLD_COLLATION_CONNECTION=@@COLLATION_CONNECTION */;
%b
/*!40103 SET @OLD_TIME_ZONE=@@TIME_ZONE */;
/*!40103 SET TIME_ZONE='+00:00' */;
/*!40014 SET @OLD_UNIQUE_CHECKS=@@UNIQUE_CHECKS, UNIQUE_CHECKS=0 */;
/*!40014 SET @OLD_FOREIGN_KEY_CHECKS=@@FOREIGN_KEY_CHECKS, FOREIGN_KEY_CHECKS=0 */;
/*!40101 SET @OLD_SQL_MODE=@@SQL_MODE, SQL_MODE='NO_AUTO_VALUE_ON_ZERO' */;
%b
"""
SANDBOX = b"/*M!999999\\- enable the sandbox mode */ \n"
NOTES = b"/*!40111 SET @OLD_SQL_NOTES=@@SQL_NOTES, SQL_NOTES=0 */;"
VERBOSITY = b"/*M!100616 SET @OLD_NOTE_VERBOSITY=@@NOTE_VERBOSITY, NOTE_VERBOSITY=0 */;"
CLOSE = b"""\
/*!40103 SET TIME_ZONE=@OLD_TIME_ZONE */;

/*!40101 SET SQL_MODE=@OLD_SQL_MODE */;
/*!40014 SET FOREIGN_KEY_CHECKS=@OLD_FOREIGN_KEY_CHECKS */;
/*!40014 SET UNIQUE_CHECKS=@OLD_UNIQUE_CHECKS */;
/*!40101 SET CHARACTER_SET_CLIENT=@OLD_CHARACTER_SET_CLIENT */;
/*!40101 SET CHARACTER_SET_RESULTS=@OLD_CHARACTER_SET_RESULTS */;
/*!40101 SET COLLATION_CONNECTION=@OLD_COLLATION_CONNECTION */;
%b

-- Dump completed%b
"""
TABLE = b"""\
CREATE TABLE `acct_table` (
  `creation_time` bigint(20) unsigned NOT NULL,
  `name` tinytext NOT NULL DEFAULT '',
  PRIMARY KEY (`name`(42))
) ENGINE=InnoDB DEFAULT CHARSET=latin1;
"""


def make_dump(*parts: bytes, end: bool = True) -> bytes:
    """A dump with these statements."""
    return b"-- MariaDB dump 10.19\n--\n" + b"".join(parts) + (b"\n-- Dump completed\n" if end else b"")


def table(name: bytes, body: bytes, options: bytes, rows: bytes = b"", version: bytes = b"40101") -> bytes:
    """A table as clients dump it, with its rows; ``version``: of the server from which on UTF-8 is set."""
    charset = version + b" SET character_set_client = utf8" + (b"" if version == b"40101" else b"mb4")
    return b"""
--
-- Table structure for table `%b`
--

DROP TABLE IF EXISTS `%b`;
/*!40101 SET @saved_cs_client     = @@character_set_client */;
/*!%b */;
CREATE TABLE `%b` (
%b
) ENGINE=InnoDB %b;
/*!40101 SET character_set_client = @saved_cs_client */;

--
-- Dumping data for table `%b`
--

LOCK TABLES `%b` WRITE;
/*!40000 ALTER TABLE `%b` DISABLE KEYS */;
%b/*!40000 ALTER TABLE `%b` ENABLE KEYS */;
UNLOCK TABLES;
""" % (name, name, charset, name, body, options, name, name, name, rows, name)


def _mysql_51() -> bytes:
    """MySQL 5.1 and 5.5, with Slurm 14.03."""
    cluster = b"""\
  `creation_time` int(10) unsigned NOT NULL,
  `mod_time` int(10) unsigned NOT NULL DEFAULT '0',
  `deleted` tinyint(4) DEFAULT '0',
  `name` tinytext NOT NULL,
  `plugin_id_select` smallint(5) unsigned DEFAULT '0',
  PRIMARY KEY (`name`(20))"""
    job = b"""\
  `job_db_inx` int(11) NOT NULL AUTO_INCREMENT,
  `account` tinytext,
  `kill_requid` int(11) NOT NULL DEFAULT '-1',
  `node_inx` text,
  PRIMARY KEY (`job_db_inx`),
  UNIQUE KEY `id_job` (`id_job`,`id_assoc`,`time_submit`)"""
    head = b"-- MySQL dump 10.13  Distrib 5.5.37, for debian-linux-gnu (x86_64)\n--\n"
    head += b"-- Host: localhost    Database: slurm_acct_db\n-- ---------\n-- Server version\t5.5.37-1\n\n"
    return (
        head + OPEN % (b"/*!40101 SET NAMES utf8 */;", NOTES)
        + table(b"cluster_table", cluster, b"DEFAULT CHARSET=latin1",
                b"INSERT INTO `cluster_table` VALUES (1400521875,1400853502,0,'nlhpc',102);\n")
        + table(b"nlhpc_job_table", job, b"AUTO_INCREMENT=3 DEFAULT CHARSET=latin1",
                b"INSERT INTO `nlhpc_job_table` VALUES (1,'a',-1,NULL),(2,NULL,-1,'0');\n")
        + CLOSE % (b"/*!40111 SET SQL_NOTES=@OLD_SQL_NOTES */;", b" on 2014-06-02 12:00:01")
    )  # fmt: skip


def _mysql_8() -> bytes:
    """MySQL 8.0 with transactions by name, and Slurm 23.11."""
    env = b"""\
  `deleted` tinyint NOT NULL DEFAULT '0',
  `hash_inx` bigint NOT NULL AUTO_INCREMENT,
  `last_used` timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP,
  `env_hash` text COLLATE utf8mb4_bin NOT NULL,
  `env_vars` longtext CHARACTER SET utf8mb3 COLLATE utf8mb3_general_ci,
  PRIMARY KEY (`hash_inx`),
  UNIQUE KEY `env_hash_inx` (`env_hash`(66))"""
    txn = b"""\
  `id` int NOT NULL AUTO_INCREMENT,
  `timestamp` bigint unsigned NOT NULL DEFAULT '0',
  `info` blob,
  PRIMARY KEY (`id`),
  KEY `archive_purge` (`timestamp`,`cluster`(42)) USING BTREE"""
    head = b"""\
-- MySQL dump 10.13  Distrib 8.0.36, for Linux (x86_64)
--
-- Host: 127.0.0.1    Database: slurm_acct_db
-- ------------------------------------------------------
-- Server version\t8.0.36
"""
    transactions = b"""\
SET @MYSQLDUMP_TEMP_LOG_BIN = @@SESSION.SQL_LOG_BIN;
SET @@SESSION.SQL_LOG_BIN= 0;

--
-- GTID state at the beginning of the backup\x20
--

SET @@GLOBAL.GTID_PURGED=/*!80000 '+'*/ 'db062cdd-4497-11f1-9bb2-1cc1deaed3e6:1-395,
ab9f2396-d1de-11f0-a352-12fcb379147c:1-83';
"""
    new = b"50503"
    return (
        head + OPEN % (b"/*!50503 SET NAMES utf8mb4 */;", NOTES) + transactions
        + table(b"c_job_env_table", env,
                b"AUTO_INCREMENT=2 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_0900_ai_ci /*!80016 ENCRYPTION='N' */",
                b"INSERT INTO `c_job_env_table` VALUES (0,1,'2026-01-02 03:04:05','x','A=1\\nB=\\\"2\\\"');\n", new)
        + table(b"txn_table", txn, b"DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_0900_ai_ci STATS_PERSISTENT=0",
                b"INSERT INTO `txn_table` VALUES (1,2,_binary 'name=\\'a\\''),(2,3,NULL),(3,4,0x00FF);\n", new)
        + b"SET @@SESSION.SQL_LOG_BIN = @MYSQLDUMP_TEMP_LOG_BIN;\n"
        + CLOSE % (b"/*!40111 SET SQL_NOTES=@OLD_SQL_NOTES */;", b"")
    )  # fmt: skip


def _mysql_57() -> bytes:
    """MySQL 5.7 without other transactions."""
    set_purged = b"SET @@GLOBAL.GTID_PURGED='';\n"
    return (
        b"-- MySQL dump 10.13  Distrib 5.7.44, for Linux (x86_64)\n--\n"
        + OPEN % (b"/*!40101 SET NAMES utf8 */;", NOTES) + set_purged
        + table(b"acct_coord_table", b"  `acct` tinytext NOT NULL,\n  PRIMARY KEY (`acct`(42))",
                b"DEFAULT CHARSET=utf8 COLLATE=utf8_unicode_ci ROW_FORMAT=DYNAMIC")
        + CLOSE % (b"/*!40111 SET SQL_NOTES=@OLD_SQL_NOTES */;", b"")
    )  # fmt: skip


def _mariadb(sandbox: bytes, notes: bytes, values: bytes, charset: bytes) -> bytes:
    """MariaDB with Slurm 24.11."""
    begin, end = b"set autocommit=0;\n", b"commit;\n"  # with --no-autocommit, which is the default from 11.8 on
    if notes == VERBOSITY:
        begin = b"SET @OLD_AUTOCOMMIT=@@AUTOCOMMIT, @@AUTOCOMMIT=0;\n"
        end = b"COMMIT;\nSET AUTOCOMMIT=@OLD_AUTOCOMMIT;\n"
    assoc = b"""\
  `creation_time` bigint(20) unsigned NOT NULL,
  `mod_time` bigint(20) unsigned NOT NULL DEFAULT 0,
  `comment` text DEFAULT NULL,
  `id_assoc` int(10) unsigned NOT NULL AUTO_INCREMENT,
  `user` tinytext NOT NULL DEFAULT '',
  `qos` blob NOT NULL DEFAULT '',
  `usage_factor` double NOT NULL DEFAULT 1,
  `usage_thres` double unsigned DEFAULT 0.5 COMMENT 'of a site''s own',
  PRIMARY KEY (`id_assoc`),
  UNIQUE KEY `udex` (`user`(42),`acct`(42),`partition`(42)),
  KEY `archive_delete` (`deleted`)"""
    script = b"""\
  `hash_inx` bigint(20) NOT NULL AUTO_INCREMENT,
  `last_used` timestamp NOT NULL DEFAULT current_timestamp() ON UPDATE current_timestamp(),
  `batch_script` longtext NOT NULL DEFAULT '',
  PRIMARY KEY (`hash_inx`)"""
    return (
        sandbox + b"-- MariaDB dump 10.19  Distrib 10.11.11-MariaDB, for Linux (x86_64)\n--\n"
        + OPEN % (b"/*!40101 SET NAMES utf8mb4 */;", notes)
        + table(b"my-cluster.1_assoc_table", assoc, b"AUTO_INCREMENT=6 DEFAULT CHARSET=" + charset,
                begin + b"INSERT INTO `my-cluster.1_assoc_table` VALUES" + values
                + b"(1,2,NULL,3,'root',',1,',1e-20,-0.5)"
                + b",\n(2,2,'\xc3\xa9',4,'','',1,NULL);\n" + end)
        + table(b"my-cluster.1_job_script_table", script, b"DEFAULT CHARSET=" + charset + b" PAGE_CHECKSUM=1",
                b"INSERT INTO `my-cluster.1_job_script_table` VALUES" + values
                + b"(1,'2026-01-02 03:04:05','#!/bin/sh\\nrm -rf \\'/tmp/x\\'; \\\\! true -- /* `id` */');\n")
        + CLOSE % (b"/*!40111 SET SQL_NOTES=@OLD_SQL_NOTES */;" if notes == NOTES
                   else b"/*M!100616 SET NOTE_VERBOSITY=@OLD_NOTE_VERBOSITY */;", b" on 2026-01-02  3:04:05")
    )  # fmt: skip


BOTH = [b"my-cluster.1_assoc_table", b"my-cluster.1_job_script_table"]
GOOD: dict[str, tuple[bytes, list[bytes], int]] = {
    "MySQL 5.5": (_mysql_51(), [b"cluster_table", b"nlhpc_job_table"], 2),
    "MySQL 5.7": (_mysql_57(), [b"acct_coord_table"], 0),
    "MySQL 8.0": (_mysql_8(), [b"c_job_env_table", b"txn_table"], 2),
    "MariaDB 10.3": (_mariadb(b"", NOTES, b" ", b"utf8"), BOTH, 2),
    "MariaDB 10.5": (
        _mariadb(b"/*!999999\\- enable the sandbox mode */ \n", NOTES, b" ", b"latin1 COLLATE=latin1_swedish_ci"),
        BOTH,
        2,
    ),
    "MariaDB 10.11": (
        _mariadb(SANDBOX, NOTES, b"\n", b"utf8mb3 COLLATE=utf8mb3_general_ci"),
        BOTH,
        2,
    ),
    "MariaDB 11.8, 12.2": (
        _mariadb(
            b"/*M!999999\\- enable the sandbox mode */ \n", VERBOSITY, b"\n", b"utf8mb4 COLLATE=utf8mb4_uca1400_ai_ci"
        ),
        BOTH,
        2,
    ),
}
"""Dump by the version that writes it so; its tables, and the number of its statements with rows."""

_INTO = b"INSERT INTO `acct_table` VALUES "
_NEW = b"CREATE TABLE `x` (\n  `a` int(11) %b\n) ENGINE=InnoDB;"
HOSTILE: dict[str, bytes] = {
    "a command": b"\\! touch /tmp/x",
    "a file as input": b"\\. /tmp/x.sql",
    "output to a file": b"\\T /tmp/x",
    "source": b"source /tmp/x.sql",
    "system": b"system touch /tmp/x",
    "delimiter": b"DELIMITER ;;",
    "charset": b"\\C gbk",
    "another schema": b"USE `mysql`;",
    "a new schema": b"CREATE DATABASE x;",
    "a table of another schema": b"CREATE TABLE `mysql`.`x` (`a` int(11)) ENGINE=InnoDB;",
    "rows of another schema": b"INSERT INTO `mysql`.`user` VALUES (1);",
    "rows of a table of another dump": b"INSERT INTO `other` VALUES (1);",
    "a file written": b"SELECT 'x' INTO OUTFILE '/tmp/x';",
    "a file read": b"LOAD DATA LOCAL INFILE '/etc/shadow' INTO TABLE `acct_table`;",
    "a right": b"GRANT ALL ON *.* TO x@localhost;",
    "a right in a comment": b"/*!40101 GRANT ALL ON *.* TO x@localhost */;",
    "a user": b"CREATE USER x@localhost;",
    "a trigger": b"/*!50003 CREATE*/ /*!50017 DEFINER=`root`@`localhost`*/ /*!50003 TRIGGER `t` BEFORE INSERT ON `x` "
    b"FOR EACH ROW SET NEW.a=1 */;",
    "an event": b"/*!50106 CREATE EVENT `e` ON SCHEDULE EVERY 1 DAY DO SELECT 1 */;",
    "a procedure": b"CREATE PROCEDURE `p`() SELECT 1;",
    "a view": b"/*!50001 CREATE ALGORITHM=UNDEFINED */\n/*!50013 DEFINER=`root`@`%` SQL SECURITY DEFINER */\n"
    b"/*!50001 VIEW `v` AS select 1 AS `a` */;",
    "a global variable": b"SET GLOBAL general_log_file='/tmp/x';",
    "a global variable of MySQL": b"SET @@GLOBAL.general_log=1;",
    "a variable": b"SET @x='DROP';",
    "two variables": b"/*!40101 SET NAMES utf8mb4, GLOBAL general_log=1 */;",
    "other quotes": b"/*!40101 SET @OLD_SQL_MODE=@@SQL_MODE, SQL_MODE='ANSI_QUOTES' */;",
    "other escapes": b"SET SQL_MODE='NO_BACKSLASH_ESCAPES';",
    "gbk": b"/*!40101 SET NAMES gbk */;",
    "big5": b"SET NAMES big5;",
    "sjis": b"/*!50503 SET character_set_client = sjis */;",
    "latin1": b"/*!40101 SET NAMES latin1 */;",
    "a prepared statement": b"PREPARE q FROM 'DROP DATABASE mysql';",
    "it is executed": b"EXECUTE IMMEDIATE 'DROP DATABASE mysql';",
    "a handler": b"HANDLER `acct_table` OPEN;",
    "a plugin": b"INSTALL PLUGIN x SONAME 'x.so';",
    "a call": b"CALL p();",
    "a block": b"BEGIN NOT ATOMIC SELECT 1; END;",
    "a renamed table": b"RENAME TABLE `acct_table` TO `mysql`.`x`;",
    "all tables unlocked, and more": b"UNLOCK TABLES, x;",
    "a lock of another schema": b"LOCK TABLES `mysql`.`user` WRITE;",
    "an altered table": b"/*!40000 ALTER TABLE `acct_table` ENGINE=CSV */;",
    "a table with another quote": b'DROP TABLE IF EXISTS "x";',
    "another table dropped": b"DROP TABLE IF EXISTS `a`,`b`;",
    "transactions with SQL": b"SET @@GLOBAL.GTID_PURGED=(SELECT 1);",
    "FEDERATED": b"CREATE TABLE `x` (`a` int(11)) ENGINE=FEDERATED CONNECTION='mysql://h/d/t';",
    "CONNECT": b"CREATE TABLE `x` (`a` int(11)) ENGINE=CONNECT TABLE_TYPE=CSV FILE_NAME='/etc/passwd';",
    "CSV": b"CREATE TABLE `x` (`a` int(11) NOT NULL) ENGINE=CSV;",
    "MyISAM": b"CREATE TABLE `x` (`a` int(11)) ENGINE=MyISAM;",
    "no engine": b"CREATE TABLE `x` (`a` int(11));",
    "two engines": b"CREATE TABLE `x` (`a` int(11)) ENGINE=InnoDB ENGINE=CSV;",
    "a data directory": b"CREATE TABLE `x` (`a` int(11)) ENGINE=InnoDB DATA DIRECTORY='/tmp/';",
    "a data directory in a comment": b"CREATE TABLE `x` (`a` int(11)) ENGINE=InnoDB /*!50100 DATA DIRECTORY='/' */;",
    "an index directory": b"CREATE TABLE `x` (`a` int(11)) ENGINE=InnoDB INDEX DIRECTORY='/tmp/';",
    "a tablespace": b"CREATE TABLE `x` (`a` int(11)) /*!50100 TABLESPACE `innodb_system` */ ENGINE=InnoDB;",
    "a union of tables": b"CREATE TABLE `x` (`a` int(11)) ENGINE=InnoDB UNION=(`mysql`.`user`);",
    "a table of a query": b"CREATE TABLE `x` ENGINE=InnoDB AS SELECT * FROM mysql.user;",
    "a table like another": b"CREATE TABLE `x` LIKE mysql.user;",
    "a query after a table": b"CREATE TABLE `x` (`a` int(11)) ENGINE=InnoDB SELECT 1;",
    "a temporary table": b"CREATE TEMPORARY TABLE `x` (`a` int(11)) ENGINE=InnoDB;",
    "a table again": TABLE,
    "our own table": b"CREATE TABLE `sms_complete` (`a` int(11)) ENGINE=InnoDB;",
    "partitions": b"CREATE TABLE `x` (`a` int(11)) ENGINE=InnoDB\n PARTITION BY HASH (`a`);",
    "a sequence": b"CREATE SEQUENCE `s` start with 1 ENGINE=InnoDB;",
    "a generated column": _NEW % b"GENERATED ALWAYS AS (sleep(1)) VIRTUAL",
    "a generated column, short": _NEW % b"AS (1)",
    "a function as default": _NEW % b"DEFAULT (uuid())",
    "a function without brackets": _NEW % b"DEFAULT sleep(9)",
    "a sequence as default": _NEW % b"DEFAULT nextval(`mysql`.`s`)",
    "a function on update": _NEW % b"ON UPDATE sleep(1)",
    "a check": _NEW % b"CHECK (sleep(1))",
    "a reference": _NEW % b"REFERENCES `mysql`.`user` (`a`)",
    "a virtual column in a comment": _NEW % b"/*!50606 AS (1) */",
    "an unknown type": b"CREATE TABLE `x` (`a` geometry) ENGINE=InnoDB;",
    "a parser of words": b"CREATE TABLE `x` (`a` text, FULLTEXT KEY `k` (`a`) WITH PARSER x) ENGINE=InnoDB;",
    "a key of a function": b"CREATE TABLE `x` (`a` int(11), KEY `k` ((sleep(1)))) ENGINE=InnoDB;",
    "a foreign key": b"CREATE TABLE `x` (`a` int(11), FOREIGN KEY (`a`) REFERENCES `y` (`a`)) ENGINE=InnoDB;",
    "a quote in a name": b"CREATE TABLE `x``; DROP DATABASE mysql; --` (`a` int(11)) ENGINE=InnoDB;",
    "a quote in a column": b'CREATE TABLE `x` (`a"b` int(11)) ENGINE=InnoDB;',
    "a subselect": _INTO + b"(1,(SELECT password FROM mysql.user));",
    "a function": _INTO + b"(1,load_file('/etc/shadow'));",
    "a variable as value": _INTO + b"(1,@@datadir);",
    "a name as value": _INTO + b"(1,`name`);",
    "a sum": _INTO + b"(1,1+1);",
    "rows of a query": b"INSERT INTO `acct_table` SELECT 1,2;",
    "rows that are there": _INTO + b"(1,'a') ON DUPLICATE KEY UPDATE `name`=sleep(9);",
    "rows returned": _INTO + b"(1,'a') RETURNING sleep(9);",
    "another character set": _INTO + b"(1,_gbk '\xbf\\');",
    "another quote": _INTO + b'(1,"a");',
    "a comment in a row": _INTO + b"(1/*!50000,sleep(9)*/,'a');",
    "a comment behind a row": _INTO + b"(1,'a')/*! ON DUPLICATE KEY UPDATE a=1 */;",
    "a line comment in a row": _INTO + b"(1,-- \n'a');",
    "a line in a text": _INTO + b"(1,'a\n\\! touch /tmp/x\n');",
    "a NUL in a text": _INTO + b"(1,'a\0b');",
    "an escape that no program writes": _INTO + b"(1,'a\\%');",
    "a text without an end": _INTO + b"(1,'a);",
    "a text that ends in an escape": _INTO + b"(1,'a\\');",
    "a gbk character": _INTO + b"(1,'\xbf\\'),(2,'; DROP DATABASE mysql; -- ');",
    "a row without an end": _INTO + b"(1,'a'",
    "a statement without an end": b"LOCK TABLES `acct_table` WRITE",
    "a plain comment": b"/* x */;",
    "a hash comment": b"# x",
    "a comment in a comment": b"/*!40101 SET NAMES /*!40101 utf8mb4 */ */;",
    "a comment that goes on": b"/*!40101 SET NAMES utf8mb4;\nGRANT ALL ON *.* TO x */;",
    "an end of a comment": b"SET NAMES utf8mb4 */;",
    "a comment without a space": b"--\\! touch /tmp/x",
    "a NUL": b"\0;",
    "nothing": b";",
    "a NUL in a comment": b"-- a\0",
    "a carriage return": b"UNLOCK TABLES;\r",
    "another sandbox": b"/*M!999999\\- enable the sandbox mode; \\! touch /tmp/x */",
    "an escape of the terminal": b"\x1b]0;x\x07",
    "a control character of eight bits": b"\x9b2J",
    "what follows the end": b"-- Dump completed\nGRANT ALL ON *.* TO x;",
    "what follows the end in comments": b"-- Dump completed\n/*!40101 SET NAMES utf8 */;",
}
"""What no client writes for one schema, by what it would do."""
